"""Metrics from sums: equal to scikit-learn on the pooled rows, however the rows are dealt to clients."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, davies_bouldin_score, normalized_mutual_info_score

from fedclust.clustering.statistics import add_statistics, cluster_means, metrics_from_statistics, silhouette_sum
from fedclust.metrics import clustering_accuracy


def statistics(
    z: torch.Tensor, labels: torch.Tensor, k: int, y: torch.Tensor | None = None, c: int = 0
) -> dict[str, Any]:
    part = {
        "n": torch.tensor(len(z)),
        "recon_sum": z.square().sum(),
        "counts": torch.bincount(labels, minlength=k),
        "sums": torch.zeros(k, z.shape[1], dtype=torch.float64).index_add_(0, labels, z),
        "square_sum": z.square().sum(0),
    }
    if y is not None:
        part["contingency"] = torch.bincount(y * k + labels, minlength=c * k).reshape(c, k)
    return part


@pytest.fixture
def pooled() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 200)
    z = rng.normal(size=(200, 4)) + 3 * np.eye(4)[y]
    labels = np.where(rng.random(200) < 0.9, (y + 1) % 4, rng.integers(0, 4, 200))
    return torch.from_numpy(z), torch.from_numpy(labels), torch.from_numpy(y)


def distance_sums(z: torch.Tensor, labels: torch.Tensor, k: int, cuts: Any = (slice(None),)) -> dict[str, torch.Tensor]:
    means, total = cluster_means(statistics(z, labels, k)), torch.zeros(k, dtype=torch.float64)
    for cut in cuts:
        total.index_add_(0, labels[cut], (z[cut] - means[labels[cut]]).norm(dim=1))
    return {"distance_sums": total}


@pytest.mark.parametrize("borders", [[0, 200], [0, 1, 200], [0, 50, 50, 170, 200]])
def test_equal_scikit_learn_on_the_pooled_rows(pooled: Any, borders: list[int]) -> None:
    z, labels, y = pooled
    cuts = [slice(a, b) for a, b in itertools.pairwise(borders)]
    # K = 5: cluster 4 is empty; C = 4: class 3 does not occur.
    total = add_statistics(statistics(z[cut], labels[cut], 5, y[cut], 4) for cut in cuts)
    metrics = metrics_from_statistics(total, distance_sums(z, labels, 5, cuts))
    assert metrics["dbi"] == pytest.approx(davies_bouldin_score(z, labels), abs=1e-9)
    assert metrics["nmi"] == pytest.approx(normalized_mutual_info_score(y, labels), abs=1e-9)
    assert metrics["ari"] == pytest.approx(adjusted_rand_score(y, labels), abs=1e-9)
    assert metrics["acc"] == pytest.approx(clustering_accuracy(y, labels), abs=1e-12)
    assert metrics["recon"] == pytest.approx(float(z.square().sum()) / 200)
    assert metrics["latent_variance"] == pytest.approx(float(z.var(0, unbiased=False).mean()), rel=1e-9)
    assert (metrics["populated"], metrics["collapsed"]) == (4.0, 0.0)
    assert all(type(value) is float for value in metrics.values())


def test_means(pooled: Any) -> None:
    z, labels, _ = pooled
    means = cluster_means(statistics(z, labels, 5))
    for k in range(4):
        assert torch.allclose(means[k], z[labels == k].mean(0))
    assert means[4].tolist() == [0.0] * 4


def test_without_labels_there_are_no_label_metrics(pooled: Any) -> None:
    z, labels, _ = pooled
    metrics = metrics_from_statistics(statistics(z, labels, 4), distance_sums(z, labels, 4))
    assert metrics.keys() == {"recon", "dbi", "populated", "latent_variance", "collapsed"}


@pytest.mark.parametrize("spread", [0.0, 1e-9, 1.0])
def test_one_cluster_for_all_is_collapsed_and_never_the_best_dbi(spread: float) -> None:
    z = 5 + spread * torch.from_numpy(np.random.default_rng(1).normal(size=(150, 2)))
    labels = torch.zeros(150, dtype=torch.int64)
    metrics = metrics_from_statistics(statistics(z, labels, 3), distance_sums(z, labels, 3))
    assert metrics["dbi"] == math.inf
    assert metrics["collapsed"] == 1.0
    assert metrics["populated"] == 1.0


def test_constant_latents_are_collapsed_whatever_the_labels() -> None:
    z, labels = torch.full((90, 2), 3.0, dtype=torch.float64), torch.arange(90) % 3
    metrics = metrics_from_statistics(statistics(z, labels, 3), distance_sums(z, labels, 3))
    assert (metrics["collapsed"], metrics["dbi"], metrics["latent_variance"]) == (1.0, math.inf, 0.0)


def test_99_percent_is_the_border() -> None:
    z = torch.from_numpy(np.random.default_rng(1).normal(size=(200, 2)))
    for others, expected in ((1, 1.0), (2, 0.0)):
        labels = torch.tensor([1] * others + [0] * (200 - others))
        metrics = metrics_from_statistics(statistics(z, labels, 2), distance_sums(z, labels, 2))
        assert metrics["collapsed"] == expected


def test_nothing_to_evaluate_says_so(pooled: Any) -> None:
    z, labels, _ = pooled
    empty = statistics(z[:0], labels[:0], 4)
    for parts in ([], [empty], [empty, empty]):
        with pytest.raises(ValueError, match=r"no client has a row in this split"):
            add_statistics(parts)
    assert int(add_statistics([empty, statistics(z, labels, 4)])["n"]) == 200


def test_the_silhouette_by_hand() -> None:
    # Means 1, 10 and 0 (empty): rows 0 and 2 have a = 1 and b = 10 or 8, row 10 is alone in its cluster.
    z = torch.tensor([[0.0], [2.0], [10.0]], dtype=torch.float64)
    labels, counts = torch.tensor([0, 0, 1]), torch.tensor([2, 1, 0])
    means = torch.tensor([[1.0], [10.0], [0.0]], dtype=torch.float64)
    assert float(silhouette_sum(z, labels, means, counts)) == pytest.approx(9 / 10 + 7 / 8)
    parts = [silhouette_sum(z[cut], labels[cut], means, counts) for cut in (slice(0, 1), slice(1, 3), slice(3, 3))]
    assert float(sum(parts)) == pytest.approx(9 / 10 + 7 / 8)


def test_equal_rows_score_nothing_and_one_cluster_is_never_the_best_silhouette() -> None:
    z, labels = torch.ones(4, 2, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    assert float(silhouette_sum(z, labels, z[:2], torch.tensor([2, 2]))) == 0.0
    total = statistics(z, labels * 0, 2)
    score = silhouette_sum(z, labels * 0, cluster_means(total), total["counts"])
    sums = {**distance_sums(z, labels * 0, 2), "silhouette_sum": score, "silhouette_input_sum": score}
    metrics = metrics_from_statistics(total, sums)
    assert metrics["silhouette"] == metrics["silhouette_input"] == -math.inf


@pytest.mark.parametrize("where", ["row", "mean"])
def test_a_silhouette_of_nan_is_nan(where: str) -> None:
    z, means = torch.eye(3, dtype=torch.float64), torch.eye(3, dtype=torch.float64) / 2
    (z if where == "row" else means)[1, 1] = math.nan
    labels, counts = torch.arange(3), torch.tensor([2, 2, 2])
    assert math.isnan(float(silhouette_sum(z, labels, means, counts)))
