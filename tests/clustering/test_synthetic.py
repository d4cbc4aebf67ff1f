"""Spread, counts, allocation and draws of FedDCN's synthetic data, by hand-computed values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedclust.apportion import allocate_rows
from fedclust.clustering.kmeans import kmeans
from fedclust.clustering.synthetic import cluster_spread, count_points, sample_latents
from fedclust.random import numpy_generator, torch_generator

# Cluster 0: distances 1, 2, 3, 4 from (0, 0); cluster 1: a single point; cluster 2: empty.
Z = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [0.0, -4.0], [7.0, 7.0]])
LABELS = torch.tensor([0, 0, 0, 0, 1])
CENTERS = torch.tensor([[0.0, 0.0], [7.0, 7.0], [50.0, 50.0]])


def test_isotropic_spread_is_the_population_std_of_the_distances() -> None:
    spread = cluster_spread(Z, LABELS, CENTERS)
    assert spread.tolist() == pytest.approx([math.sqrt(1.25), 0, 0])
    assert spread.dtype == torch.float32
    assert spread[1:].tolist() == [0, 0]  # exactly: single point and empty cluster


def test_diagonal_spread_is_the_population_std_of_each_coordinate() -> None:
    spread = cluster_spread(Z, LABELS, CENTERS, "diagonal")
    assert spread[0].tolist() == pytest.approx([np.std([1, 0, -3, 0]), np.std([0, 2, 0, -4])])
    assert spread[1:].tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("kind", ["isotropic", "diagonal"])
def test_equal_points_have_no_spread(kind: str) -> None:
    z = torch.full((6, 3), 0.1)
    assert (cluster_spread(z, torch.zeros(6, dtype=torch.int64), z[:1], kind) < 1e-7).all()


def test_counts_by_both_rules() -> None:
    spread = cluster_spread(Z, LABELS, CENTERS)  # 1.118 in cluster 0: only the point at distance 1 lies within
    assert count_points(Z, LABELS, CENTERS, spread).tolist() == [1, 1, 0]
    assert count_points(Z, LABELS, CENTERS, spread, "assigned").tolist() == [4, 1, 0]
    assert count_points(Z, LABELS, CENTERS, spread).dtype == torch.int64


def test_a_point_at_exactly_one_spread_counts_and_only_its_own_cluster_is_asked() -> None:
    z, centers = torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([[0.0], [10.0]])
    labels = torch.tensor([0, 0, 1])
    assert count_points(z, labels, centers, torch.tensor([1.0, 100.0])).tolist() == [1, 1]


def test_all_counts_within_sigma_may_be_zero() -> None:
    z = torch.tensor([[1.0], [-1.0]])  # equal distances: their std is 0
    labels, centers = torch.tensor([0, 0]), torch.tensor([[0.0]])
    spread = cluster_spread(z, labels, centers)
    assert spread.tolist() == [0]
    assert count_points(z, labels, centers, spread).tolist() == [0]
    assert count_points(z, labels, centers, spread, "assigned").tolist() == [2]


def test_a_lone_point_counts_despite_the_rounding_of_its_centre() -> None:
    z = torch.tensor([[300.3, -2.7]])
    center = torch.nextafter(z, torch.full_like(z, 1e4))
    spread = cluster_spread(z, torch.tensor([0]), center)
    assert spread.tolist() == [0]
    assert count_points(z, torch.tensor([0]), center, spread).tolist() == [1]


def test_as_many_clusters_as_rows() -> None:
    z = torch.from_numpy(numpy_generator(0, "z").normal(3, 1, (9, 4))).float()
    result = kmeans(z, 9)
    spread = cluster_spread(z, result.labels, result.centers)
    assert (spread == 0).all()
    assert count_points(z, result.labels, result.centers, spread).tolist() == [1] * 9


def test_unpopulated_clusters_get_no_spread_no_count_and_no_rows() -> None:
    z = torch.tensor([[0.0, 1.0], [5.0, 5.0]]).repeat(6, 1)
    result = kmeans(z, 4)
    spread = cluster_spread(z, result.labels, result.centers)
    counts = count_points(z, result.labels, result.centers, spread)
    rows = allocate_rows(100, counts)
    assert result.n_populated == 2
    assert (spread == 0).all()
    assert (rows[~result.populated.numpy()] == 0).all()
    assert sorted(rows.tolist()) == [0, 0, 50, 50]


@pytest.mark.parametrize(("covariance", "variance"), [("sigma_squared", 4.0), ("sigma", 2.0)])
def test_sample_variance_tells_the_two_readings_apart(covariance: str, variance: float) -> None:
    centers = torch.tensor([[1.0, -2.0, 3.0]])
    z = sample_latents(
        centers, torch.tensor([2.0]), [20000], covariance=covariance, generator=torch_generator(0, "draw")
    )
    assert z.shape == (20000, 3)
    assert z.var(dim=0).tolist() == pytest.approx([variance] * 3, rel=0.05)
    assert z.mean(dim=0).tolist() == pytest.approx([1.0, -2.0, 3.0], abs=0.06)
    assert torch.corrcoef(z.T)[0, 1].abs() < 0.03


def test_a_spread_per_coordinate_is_one() -> None:
    spread = torch.tensor([[0.5, 3.0]])
    z = sample_latents(torch.zeros(1, 2), spread, [20000], generator=torch_generator(1, "draw"))
    assert z.std(dim=0).tolist() == pytest.approx([0.5, 3.0], rel=0.03)


def test_rows_come_cluster_by_cluster_and_zero_spread_gives_the_centre() -> None:
    centers = torch.tensor([[1.0], [2.0], [3.0]])
    z = sample_latents(centers, torch.zeros(3), torch.tensor([2, 0, 1]), generator=torch_generator(0))
    assert z.tolist() == [[1.0], [1.0], [3.0]]
    assert sample_latents(centers, torch.zeros(3), [0, 0, 0], generator=torch_generator(0)).shape == (0, 1)


def test_the_generator_decides_the_draws() -> None:
    def draw(part: str) -> torch.Tensor:
        return sample_latents(torch.zeros(2, 3), torch.ones(2), [4, 5], generator=torch_generator(0, part))

    assert torch.equal(draw("a"), draw("a"))
    assert not torch.equal(draw("a"), draw("b"))


@pytest.mark.parametrize(
    ("spread", "counts", "words"),
    [
        (torch.ones(3), [1, 1], "spread must have shape"),
        (torch.tensor([1.0, -1.0]), [1, 1], "spread must be finite and at least 0"),
        (torch.tensor([1.0, float("nan")]), [1, 1], "spread must be finite"),
        (torch.ones(2), [1, -1], "counts"),
        (torch.ones(2), [1, 1, 1], "counts"),
        (torch.ones(2), [1.5, 1.5], "counts"),
    ],
)
def test_draws_refuse_bad_input(spread: torch.Tensor, counts: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sample_latents(torch.zeros(2, 3), spread, counts, generator=torch_generator(0))


def test_unknown_words_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="covariance must be one of sigma_squared, sigma, got 'full'"):
        sample_latents(CENTERS, torch.ones(3), [1, 1, 1], covariance="full", generator=torch_generator(0))
    with pytest.raises(ValueError, match="kind must be one of"):
        cluster_spread(Z, LABELS, CENTERS, "full")
    with pytest.raises(ValueError, match="rule must be one of"):
        count_points(Z, LABELS, CENTERS, torch.ones(3), "all")
    with pytest.raises(ValueError, match="isotropic one of shape"):
        count_points(Z, LABELS, CENTERS, torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2, got 0\.\.3"):
        cluster_spread(Z, LABELS + torch.tensor([0, 0, 0, 0, 2]), CENTERS)
    with pytest.raises(ValueError, match="labels must be 5 integers"):
        cluster_spread(Z, LABELS[:3], CENTERS)
    with pytest.raises(ValueError, match="z has 2 columns and centers have 1"):
        cluster_spread(Z, LABELS, CENTERS[:, :1])
