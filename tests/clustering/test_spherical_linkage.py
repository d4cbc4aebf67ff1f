"""Cosine reassignment, softmax means, and linkage clusters, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclust.clustering.linkage import linkage_clusters, separation, silhouette
from fedclust.clustering.spherical import (
    SphericalClusters,
    cosines,
    inner_products,
    reassign,
    softmax_means,
    to_centroids,
    weighted_means,
)


def clusters_of(vectors: torch.Tensor, labels: list[int], **options: int) -> SphericalClusters:
    return reassign(inner_products(vectors), torch.tensor(labels), torch.ones(len(vectors)), **options)


def test_a_vector_moves_to_the_centroid_it_points_at() -> None:
    vectors = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    found = clusters_of(vectors, [0, 0, 0, 1])
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert found.converged
    centers = torch.tensor([[1.5, 0.05], [0.05, 2.0]])[found.labels]
    torch.testing.assert_close(found.cosines.float(), torch.nn.functional.cosine_similarity(vectors, centers))


def test_weights_pull_the_centroid() -> None:
    vectors, labels = torch.tensor([[0.0, 1.0], [4.0, 1.0]]), torch.tensor([0, 0])
    weights = torch.tensor([1.0, 3.0])
    assert weighted_means(vectors, labels, weights).tolist() == [[3.0, 1.0]]
    expected = torch.nn.functional.cosine_similarity(vectors, torch.tensor([[3.0, 1.0]]))
    found = to_centroids(inner_products(vectors), labels, weights)
    torch.testing.assert_close(found.squeeze(1).float(), expected)


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_cosines_to_centroids_equal_those_of_the_centroids_themselves(scale: float) -> None:
    """Squares of float32 values of this size vanish or overflow in float32."""
    rng = torch.Generator().manual_seed(0)
    vectors = (torch.randn(12, 50, generator=rng, dtype=torch.float64) * scale).float()
    labels, weights = torch.arange(12) % 3, torch.rand(12, generator=rng) + 0.1
    centers = weighted_means(vectors.double() / scale, labels, weights)
    expected = torch.nn.functional.cosine_similarity(vectors.double()[:, None] / scale, centers[None], dim=2)
    torch.testing.assert_close(to_centroids(inner_products(vectors), labels, weights), expected, rtol=1e-6, atol=1e-6)


def test_long_vectors_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("fedclust.clustering.spherical._VALUES", 35)
    torch.testing.assert_close(inner_products(vectors), vectors.double() @ vectors.double().T)


def test_empty_clusters_are_dropped_and_zero_vectors_stay() -> None:
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 0.0], [0.0, 1.0]])
    found = clusters_of(vectors, [5, 7, 9, 9])
    assert found.labels[2] == found.labels[3]
    assert sorted(set(found.labels.tolist())) == list(range(int(found.labels.max()) + 1))


def test_equal_vectors_of_two_clusters_join_the_lower_one() -> None:
    vectors = torch.tensor([[0.1, 0.3, 0.7]]).repeat(6, 1) * torch.tensor([[1.0], [3.0], [7.0], [0.1], [0.3], [11.0]])
    assert clusters_of(vectors, [0, 1, 0, 1, 2, 2]).labels.tolist() == [0] * 6


def test_the_cap_stops_reassignment_before_its_fixed_point() -> None:
    vectors = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    found = clusters_of(vectors, [row % 6 for row in range(30)], max_iter=1)
    assert found.n_iter == 1
    assert not found.converged
    assert clusters_of(vectors, [row % 6 for row in range(30)]).n_iter > 2


def test_no_reassignment_keeps_the_clusters_and_tells_the_cosines() -> None:
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    found = clusters_of(vectors, [3, 8, 3], max_iter=0)
    assert found.labels.tolist() == [0, 1, 0]
    centers = torch.tensor([[1.0, 0.5], [0.0, 1.0]])[found.labels]
    torch.testing.assert_close(found.cosines.float(), torch.nn.functional.cosine_similarity(vectors, centers))


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -1.0]])
def test_weights_must_be_positive(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be above 0"):
        reassign(torch.ones(2, 2), torch.zeros(2, dtype=torch.int64), torch.tensor(weights))


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match=r"products \(N, N\)"):
        reassign(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), torch.ones(2))


def test_cosine_of_a_zero_vector_is_zero() -> None:
    vectors = torch.tensor([[0.0, 0.0], [3.0, 4.0], [4.0, -3.0]])
    expected = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(cosines(inner_products(vectors)), expected)


def test_softmax_means_by_hand() -> None:
    """Cosines 1 and 0 to the centroid: weights e / (e + 1) and 1 / (e + 1)."""
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    clusters = SphericalClusters(torch.tensor([0, 0]), torch.tensor([1.0, 0.0], dtype=torch.float64), 1, True)
    share = float(np.exp(1) / (np.exp(1) + 1))
    torch.testing.assert_close(softmax_means(vectors, clusters), torch.tensor([[share, 1 - share]]))


def distances(positions: list[float]) -> np.ndarray:
    points = np.array(positions)
    return np.abs(points[:, None] - points[None, :])


def test_linkage_finds_the_number_of_groups() -> None:
    assert linkage_clusters(distances([0, 1, 10, 11, 30, 31])).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("positions", [[0], [0, 5], [3, 3, 3]])
def test_few_or_equal_clients_are_one_cluster(positions: list[float]) -> None:
    assert set(linkage_clusters(distances(positions)).tolist()) == {0}


def test_separation_and_silhouette_by_hand() -> None:
    matrix = distances([0, 1, 10, 12])
    assert separation(matrix, [0, 0, 1, 1]) == 9 - 2
    assert separation(matrix, [0, 0, 0, 0]) is None
    assert silhouette(matrix, [0, 0, 0, 0]) is None
    assert silhouette(matrix, [0, 1, 2, 3]) is None
    # mean over clients of (between − within) / max: 10/11, 9/10, 7.5/9.5, 9.5/11.5
    expected = np.mean([(11 - 1) / 11, (10 - 1) / 10, (9.5 - 2) / 9.5, (11.5 - 2) / 11.5])
    assert silhouette(matrix, [0, 0, 1, 1]) == pytest.approx(expected)
