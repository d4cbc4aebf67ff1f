"""Metrics against hand-computed values and scikit-learn, and their degenerate cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from fedclust.clustering.kmeans import kmeans
from fedclust.metrics import (
    clustering_accuracy,
    collapsed,
    contingency_table,
    davies_bouldin,
    davies_bouldin_from_sums,
    scores_from_contingency,
)
from fedclust.random import numpy_generator

ACCURACIES = [
    ([0, 0, 1, 1, 2, 2], [5, 5, 9, 9, 9, 7], 5 / 6),
    ([0, 0, 0, 1, 1, 1], [0, 0, 2, 1, 1, 3], 4 / 6),
    ([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1], 4 / 6),
    ([3], [8], 1.0),
    ([0, 1, 2, 3], [0, 0, 0, 0], 1 / 4),
]


@pytest.mark.parametrize(("true", "pred", "value"), ACCURACIES)
def test_accuracy_by_hand(true: list[int], pred: list[int], value: float) -> None:
    assert clustering_accuracy(true, pred) == pytest.approx(value, abs=1e-15)
    assert clustering_accuracy(torch.tensor(true), np.array(pred, dtype=np.uint8)) == pytest.approx(value)
    table = contingency_table(true, pred, max(true) + 1, max(pred) + 1)
    assert scores_from_contingency(table)["acc"] == pytest.approx(value)


def test_accuracy_does_not_depend_on_the_names_of_the_labels() -> None:
    rng = numpy_generator(0, "labels")
    true, pred = rng.integers(0, 4, 200), rng.integers(0, 6, 200)
    value = clustering_accuracy(true, pred)
    for seed in range(5):
        names = numpy_generator(seed, "names").permutation(1000)
        assert clustering_accuracy(names[true], names[::-1][pred]) == value
    assert clustering_accuracy(pred, true) == value  # one to one, so symmetric


@pytest.mark.parametrize(
    ("true", "pred", "words"),
    [
        ([0, 1], [0, -1], "pred must hold labels of at least 0, got -1"),
        ([-1, 1], [0, 1], "true must hold labels of at least 0, got -1"),
        ([0, 1, 2], [0, 1], "same length, got 3 and 2"),
        ([], [], "true must be a non-empty list"),
        ([0, 1], [0.0, 1.0], "pred must hold integers"),
        ([[0, 1]], [[0, 1]], "true must be a non-empty list"),
    ],
)
def test_accuracy_refuses_bad_labels(true: list, pred: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        clustering_accuracy(true, pred)
    with pytest.raises(ValueError, match=words):
        contingency_table(true, pred, 5, 5)


def test_table_by_hand_and_its_sum_over_clients() -> None:
    true, pred = np.array([0, 0, 1, 1, 1]), np.array([2, 2, 0, 2, 0])
    table = contingency_table(true, pred, 3, 4)
    assert table.tolist() == [[0, 0, 2, 0], [2, 0, 1, 0], [0, 0, 0, 0]]
    parts = contingency_table(true[:2], pred[:2], 3, 4) + contingency_table(true[2:], pred[2:], 3, 4)
    assert np.array_equal(parts, table)
    with pytest.raises(ValueError, match="pred must hold labels below 2, got 2"):
        contingency_table(true, pred, 3, 2)
    with pytest.raises(ValueError, match="true must hold labels below 1, got 1"):
        contingency_table(true, pred, 1, 4)


LABELINGS = {
    "random": lambda rng: (rng.integers(0, 7, 500), rng.integers(0, 10, 500)),
    "related": lambda rng: (lambda t: (t, np.where(rng.random(500) < 0.8, t, rng.integers(0, 12, 500))))(
        rng.integers(0, 10, 500)
    ),
    "equal": lambda rng: (lambda t: (t, (t + 3) % 10))(rng.integers(0, 10, 500)),
    "one cluster": lambda rng: (rng.integers(0, 5, 300), np.full(300, 3)),
    "one class": lambda rng: (np.full(300, 2), rng.integers(0, 5, 300)),
    "one of each": lambda rng: (np.full(50, 2), np.full(50, 4)),
    "all apart": lambda rng: (np.arange(40), rng.permutation(40)),
    "single row": lambda rng: (np.array([1]), np.array([0])),
    "independent": lambda rng: (np.repeat([0, 1], 50), np.tile([0, 1], 50)),
}


@pytest.mark.parametrize("name", LABELINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_scores_equal_scikit_learn(name: str, seed: int) -> None:
    true, pred = LABELINGS[name](numpy_generator(seed, name))
    scores = scores_from_contingency(torch.from_numpy(contingency_table(true, pred, 50, 50)))
    assert scores["nmi"] == pytest.approx(reference.normalized_mutual_info_score(true, pred), abs=1e-9)
    assert scores["ari"] == pytest.approx(reference.adjusted_rand_score(true, pred), abs=1e-9)
    assert scores["acc"] == pytest.approx(clustering_accuracy(true, pred), abs=1e-12)


def test_scores_of_a_hundred_thousand_rows_do_not_overflow() -> None:
    rng = numpy_generator(0, "many")
    true = rng.integers(0, 3, 200_000)
    pred = np.where(rng.random(200_000) < 0.9, true, 0)
    scores = scores_from_contingency(contingency_table(true, pred, 3, 3))
    assert scores["ari"] == pytest.approx(reference.adjusted_rand_score(true, pred), abs=1e-9)
    assert scores["nmi"] == pytest.approx(reference.normalized_mutual_info_score(true, pred), abs=1e-9)


@pytest.mark.parametrize("table", [[[0, 0], [0, 0]], [[1, -1], [0, 3]], [1, 2], [[0.5, 0.5]]])
def test_scores_refuse_tables_that_count_nothing(table: list) -> None:
    with pytest.raises(ValueError, match="the table must hold"):
        scores_from_contingency(table)


def three_blobs(d: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = numpy_generator(0, "blobs")
    x = np.concatenate([rng.normal(c, s, (n, d)) for c, s, n in ((0, 1, 30), (8, 0.5, 50), (-9, 2, 20))])
    return x, kmeans(x, 3, seed=0).labels


def test_davies_bouldin_equals_scikit_learn_on_three_converged_blobs() -> None:
    x, labels = three_blobs()
    value = reference.davies_bouldin_score(x, labels)
    assert davies_bouldin(x, labels) == pytest.approx(value, abs=1e-9)
    assert davies_bouldin(torch.from_numpy(x), torch.from_numpy(labels) * 4 + 1) == pytest.approx(value, abs=1e-9)


def test_davies_bouldin_from_the_sums_of_two_clients_equals_the_pooled_one() -> None:
    x, labels = three_blobs()
    n_clusters = 5  # two of them without rows
    order = numpy_generator(1, "split").permutation(len(x))
    counts, sums = np.zeros(n_clusters, dtype=int), np.zeros((n_clusters, x.shape[1]))
    for part in (order[:35], order[35:]):
        np.add.at(counts, labels[part], 1)
        np.add.at(sums, labels[part], x[part])
    means = sums / np.maximum(counts, 1)[:, None]
    distances = np.zeros(n_clusters)
    for part in (order[:35], order[35:]):
        np.add.at(distances, labels[part], np.linalg.norm(x[part] - means[labels[part]], axis=1))
    value = davies_bouldin_from_sums(counts, torch.from_numpy(sums), distances)
    assert value == pytest.approx(reference.davies_bouldin_score(x, labels), abs=1e-9)


def test_davies_bouldin_with_singletons_by_hand() -> None:
    x = np.array([[0.0, 0.0], [2.0, 2.0], [3.0, 3.0], [5.0, 5.0]])
    assert davies_bouldin(x, [0, 0, 1, 2]) == pytest.approx(5 / 12, abs=1e-12)


@pytest.mark.parametrize(
    ("x", "labels"),
    [
        ([[0.0], [1.0], [2.0]], [0, 0, 0]),  # one cluster
        ([[0.0], [0.0], [0.0], [0.0]], [0, 0, 1, 1]),  # same mean, no spread
        ([[-1.0], [1.0], [-2.0], [2.0]], [0, 0, 1, 1]),  # same mean, spread
        ([[-1.0], [1.0], [-2.0], [2.0], [9.0], [9.5]], [0, 0, 1, 1, 2, 2]),  # two of three share a mean
        ([[0.0], [0.0], [0.0], [0.0], [9.0], [9.0]], [0, 0, 1, 1, 2, 2]),  # likewise, no spread
        ([[0.0], [1.0], [2.0]], [0, 1, 2]),  # nothing but singletons
        ([[3.0]], [0]),
    ],
)
def test_a_degenerate_clustering_never_wins(x: list, labels: list[int]) -> None:
    assert davies_bouldin(x, labels) == math.inf


def test_davies_bouldin_zero_spread_apart_is_zero() -> None:
    assert davies_bouldin([[0.0], [0.0], [1.0], [1.0]], [0, 0, 1, 1]) == 0


@pytest.mark.parametrize("n_held", [0, 1])
def test_fewer_than_two_populated_clusters_in_sums(n_held: int) -> None:
    counts = np.array([5] * n_held + [0] * (3 - n_held))
    assert davies_bouldin_from_sums(counts, np.zeros((3, 2)), np.zeros(3)) == math.inf


def test_davies_bouldin_refuses_bad_input() -> None:
    with pytest.raises(ValueError, match="1 of 2 rows of x hold NaN"):
        davies_bouldin([[0.0], [math.nan]], [0, 1])
    with pytest.raises(ValueError, match=r"x must have shape \(3, features\)"):
        davies_bouldin([[0.0], [1.0]], [0, 1, 1])
    with pytest.raises(ValueError, match="labels of at least 0"):
        davies_bouldin([[0.0], [1.0]], [0, -1])
    with pytest.raises(ValueError, match="need counts"):
        davies_bouldin_from_sums([1, 2], [[0.0], [1.0]], [1.0])
    for counts, sums, distances in (
        ([1, -2], [[0.0], [1.0]], [1.0, 1.0]),
        ([1, 2], [[0.0], [math.nan]], [1.0, 1.0]),
        ([1, 2], [[0.0], [1.0]], [1.0, -1.0]),
    ):
        with pytest.raises(ValueError, match="must be finite"):
            davies_bouldin_from_sums(counts, sums, distances)


def test_collapse_is_told_by_share_and_by_variance() -> None:
    assert collapsed([50, 50], 1.0) is None
    assert collapsed(torch.tensor([99, 1]), 1.0) is None  # exactly 99 % is not more than 99 %
    assert "cluster 1 holds 99.5% of the rows" in str(collapsed([1, 199, 0], 1.0))
    assert "variance" in str(collapsed([50, 50], 1e-9))
    assert collapsed([50, 50], 1e-8) is None
    assert "variance" in str(collapsed([50, 50], math.nan))
    assert collapsed([100], 1.0) is None  # K = 1 was asked for
    assert "variance" in str(collapsed([100], 0.0))


@pytest.mark.parametrize("counts", [[0, 0], [3, -1], []])
def test_collapse_needs_rows(counts: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        collapsed(np.array(counts, dtype=int), 1.0)
