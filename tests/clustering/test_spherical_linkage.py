"""Cosine reassignment, softmax means, and linkage clusters, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclust.clustering.linkage import linkage_clusters, separation, silhouette
from fedclust.clustering.spherical import cosine, reassign, softmax_means, weighted_means


def test_a_vector_moves_to_the_centroid_it_points_at() -> None:
    vectors = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [0.1, 3.0]])
    found = reassign(vectors, torch.tensor([0, 0, 0, 1]), torch.ones(4))
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert found.converged
    torch.testing.assert_close(found.centroids, torch.tensor([[1.5, 0.05], [0.05, 2.0]]))


def test_weights_pull_the_centroid() -> None:
    vectors, labels = torch.tensor([[0.0, 1.0], [4.0, 1.0]]), torch.tensor([0, 0])
    assert weighted_means(vectors, labels, torch.tensor([1.0, 3.0])).tolist() == [[3.0, 1.0]]


def test_empty_clusters_are_dropped_and_zero_vectors_stay() -> None:
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 0.0], [0.0, 1.0]])
    found = reassign(vectors, torch.tensor([5, 7, 9, 9]), torch.ones(4))
    assert found.labels[2] == found.labels[3]
    assert sorted(set(found.labels.tolist())) == list(range(len(found.centroids)))


def test_the_cap_ends_the_search_and_says_so() -> None:
    vectors = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    start, weights = torch.arange(30) % 6, torch.ones(30)
    whole = reassign(vectors, start, weights)
    assert whole.converged
    for cap in (1, whole.n_iter - 1):
        capped = reassign(vectors, start, weights, max_iter=cap)
        assert not capped.converged
        assert capped.n_iter == cap
    first = reassign(vectors, start, weights, max_iter=1)
    assert not torch.equal(first.labels, whole.labels)
    torch.testing.assert_close(first.centroids, weighted_means(vectors, first.labels, weights))
    assert torch.equal(reassign(vectors, first.labels, weights).labels, whole.labels)


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, -1.0]])
def test_weights_must_be_positive(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights must be above 0"):
        reassign(torch.ones(2, 2), torch.zeros(2, dtype=torch.int64), torch.tensor(weights))


def test_cosine_of_a_zero_vector_is_zero() -> None:
    table = cosine(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[3.0, 4.0], [4.0, -3.0]]))
    torch.testing.assert_close(table, torch.tensor([[0.0, 0.0], [1.0, 0.0]]))


def test_softmax_means_by_hand() -> None:
    vectors, labels = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    center = torch.tensor([[1.0, 0.0]])
    share = float(np.exp(1) / (np.exp(1) + 1))
    torch.testing.assert_close(softmax_means(vectors, labels, center), torch.tensor([[share, 1 - share]]))


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
