"""Minimum spanning tree, medoid Davies-Bouldin and adaptive clusters: hand values and degenerate cases."""

from __future__ import annotations

import math
from itertools import chain, combinations

import networkx
import numpy as np
import pytest
import torch
from scipy.sparse.csgraph import minimum_spanning_tree as scipy_tree
from sklearn.metrics import adjusted_rand_score

from fedclust.clustering.trees import Edge, adaptive_clusters, medoid_davies_bouldin, minimum_spanning_tree
from fedclust.random import numpy_generator

OUTLIER = [0, 1, 10, 11, 100]
PAIRS = np.kron(1 - np.eye(2), np.full((2, 2), 9.0))  # A, A, B, B


def line(positions: object) -> np.ndarray:
    x = np.asarray(positions, float)
    return np.abs(x[:, None] - x[None])


def random_matrix(n: int, seed: int, values: int | None = None) -> np.ndarray:
    rng = numpy_generator(seed, "matrix")
    drawn = rng.random((n, n)) if values is None else rng.integers(0, values, (n, n)).astype(float)
    upper = np.triu(drawn, 1)
    return upper + upper.T


def spans(edges: list[Edge], n: int) -> bool:
    graph = networkx.Graph([(a, b) for a, b, _ in edges])
    graph.add_nodes_from(range(n))
    return networkx.is_connected(graph)


def test_edges_of_weight_zero_are_edges() -> None:
    assert minimum_spanning_tree([[0, 0, 5], [0, 0, 5], [5, 5, 0]]) == [(0, 1, 0.0), (0, 2, 5.0)]
    assert minimum_spanning_tree(np.zeros((4, 4))) == [(0, 1, 0.0), (0, 2, 0.0), (0, 3, 0.0)]
    tiny = 1e-9 * (1 - np.eye(4))
    assert [edge.weight for edge in minimum_spanning_tree(tiny)] == [1e-9] * 3


@pytest.mark.parametrize("n", [1, 2, 3, 10, 60])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tree_has_the_least_total_weight(n: int, seed: int) -> None:
    matrix = random_matrix(n, seed)
    edges = minimum_spanning_tree(matrix)
    assert len(edges) == n - 1
    assert spans(edges, n)
    assert sum(edge.weight for edge in edges) == pytest.approx(scipy_tree(matrix).sum())
    assert edges == sorted(edges, key=lambda edge: (edge.weight, edge.a, edge.b))
    assert all(a < b and weight == matrix[a, b] for a, b, weight in edges)


@pytest.mark.parametrize("seed", range(20))
def test_among_equal_trees_the_first_edges_win(seed: int) -> None:
    """Kruskal over the edges in the order (weight, a, b) is that rule itself."""
    matrix = random_matrix(9, seed, values=3)
    group = list(range(9))
    chosen = []
    for weight, a, b in sorted((matrix[a, b], a, b) for a, b in combinations(range(9), 2)):
        if group[a] != group[b]:
            chosen.append((a, b, weight))
            group = [group[a] if g == group[b] else g for g in group]
    assert minimum_spanning_tree(matrix) == chosen


def test_davies_bouldin_by_hand() -> None:
    # Medoids 0 (ties to the first) and 10; S = 1/2 and (0 + 1 + 90)/3 with medoid 11: |10-11| + |100-11| = 90.
    matrix = line(OUTLIER)
    assert medoid_davies_bouldin(matrix, [0, 0, 1, 1, 1]) == pytest.approx((0.5 + 30) / 11)
    # Three clusters: spreads 1/2, 1/2, 0; gaps 10, 100, 90.
    expected = (1 / 10 + 1 / 10 + max(0.5 / 100, 0.5 / 90)) / 3
    assert medoid_davies_bouldin(matrix, [7, 7, -1, -1, 3]) == pytest.approx(expected)


def test_davies_bouldin_of_degenerate_clusters() -> None:
    # Two clusters around one place: medoids coincide, spread above 0.
    assert medoid_davies_bouldin(line([5, 5, 6, 5, 5, 4]), [0, 0, 0, 1, 1, 1]) == math.inf
    assert medoid_davies_bouldin(np.zeros((4, 4)), [0, 0, 1, 1]) == math.inf
    assert medoid_davies_bouldin(line([0, 1, 50, 50, 50, 50]), [0, 0, 1, 1, 2, 2]) == math.inf
    assert medoid_davies_bouldin(line([1, 2, 3]), [4, 4, 4]) is None
    assert medoid_davies_bouldin([[0]], [0]) is None
    assert medoid_davies_bouldin(PAIRS, [0, 0, 1, 1]) == 0


def test_the_next_edge_is_tried_when_one_would_leave_an_outlier_alone() -> None:
    found = adaptive_clusters(line(OUTLIER))
    assert found.clusters == [[0, 1], [2, 3, 4]]
    assert found.labels.tolist() == [0, 0, 1, 1, 1]
    assert found.removed == [(1, 2, 9.0)]
    assert found.rejected[0] == ((3, 4, 89.0), "leaves a client alone")
    assert found.dbi == pytest.approx(30.5 / 11)
    assert found.reason == "all 4 edges tried, 1 cut"


def test_equal_pairs_and_all_equal() -> None:
    found = adaptive_clusters(PAIRS)
    assert found.clusters == [[0, 1], [2, 3]]
    assert found.dbi == 0
    for scale in (0.0, 1e-9):
        found = adaptive_clusters(scale * (1 - np.eye(4)))
        assert found.clusters == [[0, 1, 2, 3]]
        assert found.dbi is None
        assert found.removed == []
        assert len(found.rejected) == 3
    assert adaptive_clusters(np.zeros((4, 4))).reason == "no admissible cut: all clients are equal"
    assert adaptive_clusters(np.zeros((6, 6))).clusters == [[0, 1, 2, 3, 4, 5]]


def test_a_first_cut_between_coinciding_medoids_is_rejected() -> None:
    # Pairs {0, 2} and {1, 3} of spread 1/2 whose medoids 0 and 1 lie at distance 0.
    found = adaptive_clusters([[0, 0, 1, 5], [0, 0, 5, 1], [1, 5, 0, 5], [5, 1, 5, 0]])
    assert found.clusters == [[0, 1, 2, 3]]
    assert found.dbi is None
    assert found.reason == "no admissible cut: 2 × leaves a client alone, 1 × two medoids coincide"
    assert found.rejected[-1] == ((0, 1, 0.0), "two medoids coincide")


@pytest.mark.parametrize(("n", "count"), [(1, "1 client,"), (2, "2 clients,"), (3, "3 clients,")])
def test_fewer_than_four_clients_stay_together(n: int, count: str) -> None:
    found = adaptive_clusters(line([0, 5, 90][:n]))
    assert found.clusters == [list(range(n))]
    assert found.dbi is None
    assert found.reason.startswith(f"no admissible cut: {count}")
    assert len(found.rejected) == n - 1


def test_a_cut_that_raises_the_index_is_rejected_and_one_that_keeps_it_is_accepted() -> None:
    # Three pairs: the cut at 100 gives (1/2 + ...)/M, the next one at 6 is worse.
    found = adaptive_clusters(line([0, 1, 7, 8, 108, 109]))
    assert found.clusters == [[0, 1, 2, 3], [4, 5]]
    assert [rejection.edge.weight for rejection in found.rejected] == [6, 1, 1, 1]
    assert found.rejected[0].reason.startswith("Davies-Bouldin ")
    # {0, 1}, {2, 3, 4, 5}: (1/2 + 1)/3 with medoids 0 and 3; then three pairs: (1/2 + 1/2)/2. Equal is not worse.
    found = adaptive_clusters(line(range(6)))
    assert found.clusters == [[0, 1], [2, 3], [4, 5]]
    assert found.dbi == 0.5
    assert adaptive_clusters(line([0, 0, 5, 5, 99, 99])).clusters == [[0, 1], [2, 3], [4, 5]]


def by_definition(matrix: np.ndarray) -> list[list[int]]:
    """The paper's loop over a networkx graph, an index written out from Section 3.4."""
    n = len(matrix)
    edges = sorted(minimum_spanning_tree(matrix), key=lambda edge: (-edge.weight, edge.a, edge.b))
    tree = networkx.Graph()
    tree.add_nodes_from(range(n))
    tree.add_edges_from((a, b) for a, b, _ in edges)
    best = math.inf
    for a, b, _ in edges:
        tree.remove_edge(a, b)
        parts = [sorted(part) for part in networkx.connected_components(tree)]
        if min(map(len, parts)) < 2 or (value := index_by_definition(matrix, parts)) > best or value == math.inf:
            tree.add_edge(a, b)
        else:
            best = value
    return sorted(sorted(part) for part in networkx.connected_components(tree))


def index_by_definition(matrix: np.ndarray, parts: list[list[int]]) -> float:
    medoids = [min(part, key=lambda i: (sum(matrix[i, j] for j in part), i)) for part in parts]
    spread = [sum(matrix[m, j] for j in part) / len(part) for m, part in zip(medoids, parts)]
    worst = []
    for i, m in enumerate(medoids):
        ratios = []
        for j, other in enumerate(medoids):
            if i != j:
                gap = matrix[m, other]
                ratios.append((spread[i] + spread[j]) / gap if gap > 0 else math.inf)
        worst.append(max(ratios))
    return sum(worst) / len(worst)


@pytest.mark.parametrize("seed", range(12))
def test_clusters_equal_the_definition(seed: int) -> None:
    rng = numpy_generator(seed, "points")
    points = rng.normal(size=(24, 2)) + rng.integers(0, 4, (24, 1)) * 6
    matrix = np.abs(points[:, None] - points[None]).sum(-1)
    found = adaptive_clusters(matrix)
    assert sorted(found.clusters) == by_definition(matrix)
    if len(found.clusters) > 1:
        assert found.dbi == pytest.approx(medoid_davies_bouldin(matrix, found.labels))
        assert min(map(len, found.clusters)) >= 2
    assert len(found.removed) == len(found.clusters) - 1
    assert len(found.removed) + len(found.rejected) == 23


@pytest.mark.parametrize("values", [None, 3])
@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_the_clients_does_not_change_the_partition(values: int | None, seed: int) -> None:
    matrix = random_matrix(14, seed, values)
    names = [f"c{10 * i}" for i in range(14)]
    found = adaptive_clusters(matrix, names)
    order = numpy_generator(seed, "order").permutation(14)
    other = adaptive_clusters(matrix[np.ix_(order, order)], [names[i] for i in order])
    assert {frozenset(c) for c in other.clusters} == {frozenset(c) for c in found.clusters}
    assert adjusted_rand_score(found.labels[order], other.labels) == 1
    assert other.removed == found.removed
    assert other.rejected == found.rejected
    assert sorted(chain.from_iterable(found.clusters)) == sorted(names)


def test_ids_stay_ids() -> None:
    found = adaptive_clusters(line([0, 1, 10, 11]), np.array([3, 7, 9, 20]))
    assert found.clusters == [[3, 7], [9, 20]]
    assert found.removed == [(7, 9, 9.0)]
    assert [type(i) for i in found.clusters[0]] == [int, int]
    assert adaptive_clusters(line([0, 1, 10, 11]), torch.tensor([3, 7, 9, 20])).clusters == [[3, 7], [9, 20]]
    assert adaptive_clusters(line([0, 9, 20]), [3, 7, 9]).clusters == [[3, 7, 9]]
    split_twice = adaptive_clusters(line([0, 0, 50, 50, 53, 53]), ["c40", "c10", "c30", "c20", "c60", "c50"])
    assert split_twice.clusters == [["c40", "c10"], ["c30", "c20"], ["c60", "c50"]]
    assert split_twice.labels.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[0, np.nan], [np.nan, 0]], "finite and at least 0, got nan between clients 0 and 1"),
        ([[0, math.inf], [math.inf, 0]], "got inf"),
        ([[0, -1], [-1, 0]], "got -1.0"),
        ([[0, 1], [2, 0]], "symmetric, got 1.0 and 2.0 between clients 0 and 1"),
        ([[0, 1], [1, 3]], "0 on the diagonal, got 3.0 for client 1"),
        ([[0, 1]], r"square matrix .*, got shape \(1, 2\)"),
        (np.empty((0, 0)), "at least one client"),
    ],
)
def test_what_is_no_distance_matrix_is_refused(matrix: object, message: str) -> None:
    for function in (minimum_spanning_tree, adaptive_clusters, lambda m: medoid_davies_bouldin(m, [0, 0])):
        with pytest.raises(ValueError, match=message):
            function(matrix)


@pytest.mark.parametrize("labels", [[0], [0.5, 1.0], [[0, 1]]])
def test_labels_that_do_not_fit_are_refused(labels: object) -> None:
    with pytest.raises(ValueError, match=r"labels must be integers of shape \(2,\)"):
        medoid_davies_bouldin(line([0, 1]), labels)


@pytest.mark.parametrize(
    ("ids", "message"), [([1], "2 distinct names, got 1"), ([1, 1], "with 1 distinct"), ([1, "a"], "can be sorted")]
)
def test_ids_that_do_not_fit_are_refused(ids: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adaptive_clusters(line([0, 1]), ids)


def test_five_hundred_clients() -> None:
    rng = numpy_generator(0, "many")
    planted = rng.integers(0, 5, 500)
    points = 100 * np.eye(5)[planted] + rng.normal(size=(500, 5))
    matrix = np.sqrt(((points[:, None] - points[None]) ** 2).sum(-1))
    found = adaptive_clusters(matrix)
    assert adjusted_rand_score(planted, found.labels) == 1


def test_of_medoids_that_tie_but_for_rounding_the_first_counts() -> None:
    """All four means are .15; as sums of floats the last two come out smaller by one bit."""
    matrix = np.array([[0, 0.1, 0.2, 0.3], [0.1, 0, 0.3, 0.2], [0.2, 0.3, 0, 0.1], [0.3, 0.2, 0.1, 0]])
    assert len(set(matrix.mean(axis=1))) == 2
    far = np.full((6, 6), 1.0)
    far[:4, :4], far[4:, 4:] = matrix, [[0, 0.1], [0.1, 0]]
    far[2, 4] = far[4, 2] = 0.5  # the distance of the third one's medoid, were it the medoid
    # S = .15 and .05, M = 1 between the first client and client 4
    assert medoid_davies_bouldin(far, np.array([0, 0, 0, 0, 1, 1])) == pytest.approx(0.2)
