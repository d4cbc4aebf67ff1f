"""FMCL's signatures and distances, by hand; and the automatic number of clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, silhouette_score

from fedclust.clustering.automatic import automatic_clusters
from fedclust.clustering.signatures import Signature, signature, signature_distances


def client(weights: dict[int, float], means: dict[int, list[float]]) -> Signature:
    classes = sorted(weights)
    return Signature(
        torch.tensor(classes),
        torch.tensor([means[c] for c in classes]),
        torch.tensor([weights[c] for c in classes], dtype=torch.float64),
    )


def disjoint(groups: int, members: int, spread: float, seed: int = 0) -> list[Signature]:
    """Clients of a group hold its two classes, of no other group, in nearly equal shares."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(groups):
        pair = [2 * group, 2 * group + 1]
        centers = {c: np.eye(2 * groups)[c] for c in pair}
        for _ in range(members):
            share = 0.5 + rng.uniform(-0.05, 0.05)
            means = {c: (centers[c] + spread * rng.normal(size=2 * groups)).tolist() for c in pair}
            found.append(client({pair[0]: share, pair[1]: 1 - share}, means))
    return found


def test_a_signature_is_means_and_shares() -> None:
    found = signature(torch.tensor([[0.0, 2], [2, 4], [6, 6], [1, 1]]), torch.tensor([3, 3, 3, 1]))
    assert found.classes.tolist() == [1, 3]
    assert torch.allclose(found.means, torch.tensor([[1.0, 1], [8 / 3, 4]]))
    assert found.weights.tolist() == [0.25, 0.75]


def test_the_hand_value_of_the_overlap_aware_distance() -> None:
    """w_i = (.5, .5), w_j = (.9, .1), both cosines 0: m = (.5, .1), mean 1, Ω = .6, d = 1/.6."""
    one = client({0: 0.5, 1: 0.5}, {0: [1, 0, 0, 0], 1: [0, 1, 0, 0]})
    two = client({0: 0.9, 1: 0.1}, {0: [0, 0, 1, 0], 1: [0, 0, 0, 1]})
    scaled = signature_distances([one, two], center=False)
    assert scaled.distances[0, 1] == pytest.approx(1.6667, abs=1e-4)
    assert scaled.overlaps[0, 1] == pytest.approx(0.6)
    assert signature_distances([one, two], center=False, overlap_scaling=False).distances[0, 1] == pytest.approx(1.0)


def test_distances_equal_the_formula_pair_by_pair() -> None:
    rng = np.random.default_rng(3)
    clients = []
    for _ in range(7):
        held = sorted(rng.choice(6, rng.integers(2, 6), replace=False).tolist())
        shares = rng.dirichlet(np.ones(len(held)))
        clients.append(client(dict(zip(held, shares, strict=True)), {c: rng.normal(size=4).tolist() for c in held}))
    found = signature_distances(clients, center=False)
    assert np.array_equal(found.distances, found.distances.T)
    assert not np.diagonal(found.distances).any()
    for i in range(7):
        for j in range(i):
            a, b = (dict(zip(c.classes.tolist(), range(9), strict=False)) for c in (clients[i], clients[j]))
            total = upper = 0.0
            for c in a.keys() & b.keys():
                m = min(float(clients[i].weights[a[c]]), float(clients[j].weights[b[c]]))
                u, v = clients[i].means[a[c]].double(), clients[j].means[b[c]].double()
                total, upper = total + m, upper + m * (1 - float(u @ v / u.norm() / v.norm()))
            if total:
                assert found.distances[i, j] == pytest.approx(upper / total / total, abs=1e-6)
                assert found.overlaps[i, j] == pytest.approx(total)
            else:
                assert found.distances[i, j] == found.far


def test_centring_takes_the_common_direction_off() -> None:
    """Means (10, ±1): raw cosines are near 1, centred ones −1; a public constant does the same."""
    clients = [client({0: 1.0}, {0: [10, 1]}), client({0: 1.0}, {0: [10, -1]})]
    assert signature_distances(clients, center=False).distances[0, 1] < 0.03
    assert signature_distances(clients).distances[0, 1] == pytest.approx(2)
    assert signature_distances(clients, center=[10.0, 0.0]).distances[0, 1] == pytest.approx(2)
    with pytest.raises(ValueError, match=r"center must have shape \(2,\), got \(3,\)"):
        signature_distances(clients, center=[0.0, 0.0, 0.0])


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.1])
def test_groups_with_disjoint_labels_are_found(spread: float) -> None:
    """All observed distances are small ones within groups: a bare percentile of them would not be far."""
    found = signature_distances(disjoint(5, 4, spread), center=False)
    assert found.far is not None
    observed = found.distances[(found.overlaps > 0) & (found.overlaps < 1)]
    assert found.far > observed.max()
    clusters = automatic_clusters(found.distances)
    assert clusters.n_clusters == 5
    assert adjusted_rand_score(np.repeat(range(5), 4), clusters.labels) == 1.0


def test_clients_of_which_no_two_share_a_class_stay_together_with_the_reason() -> None:
    found = signature_distances(disjoint(4, 1, 0.1), center=False)
    assert (found.far, found.reason) == (1.0, "no two clients share a class")
    clusters = automatic_clusters(found.distances)
    assert clusters.n_clusters == 1
    assert clusters.reason == "all distances are equal to 1"


def test_a_client_with_one_class_and_a_mean_of_zero() -> None:
    clients = [client({0: 1.0}, {0: [0, 0]}), client({0: 0.5, 1: 0.5}, {0: [1, 0], 1: [0, 1]})]
    assert signature_distances(clients, center=False).distances[0, 1] == pytest.approx(1 / 0.5)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("n_classes", [1, 2, 3, 10])
@pytest.mark.parametrize("width", [5, 84, 1280])
def test_equal_clients_are_at_distance_0_in_one_cluster(n_classes: int, width: int, center: bool) -> None:
    """Whether their rows come in the same order or not, as features of one batch or with other last bits."""
    generator = torch.Generator().manual_seed(width + n_classes)
    x, y = torch.rand(40, width, generator=generator), torch.arange(40) % n_classes
    for n in (3, 5, 12, 50):
        orders = [torch.randperm(40, generator=generator) for _ in range(n)]
        last_bits = [x * (1 + 1e-7 * torch.randn(x.shape, generator=generator)) for _ in range(n)]
        for clients in (
            [signature(x, y)] * n,
            [signature(x[rows], y[rows]) for rows in orders],
            [signature(rows, y) for rows in last_bits],
        ):
            found = signature_distances(clients, center=center)
            assert not found.distances.any()
            clusters = automatic_clusters(found.distances)
            assert (clusters.n_clusters, clusters.reason) == (1, "all distances are equal to 0")


def test_two_centred_means_of_zero_are_equal_and_unlike_any_other() -> None:
    clients = [client({0: 1.0}, {0: [3, 4]}), client({0: 1.0}, {0: [3, 4]}), client({0: 1.0}, {0: [3, 5]})]
    found = signature_distances(clients, center=[3.0, 4.0]).distances
    assert found.tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 0]]
    assert not signature_distances(clients[:2]).distances.any()


def test_small_differences_are_no_rounding() -> None:
    """Raw features with a large common part: 1 - cos is near 1e-8, far above what rounding makes of equal ones."""
    generator = torch.Generator().manual_seed(0)
    base = 1000 + torch.rand(2, 20, generator=generator)
    clients = [
        signature(base[[group]] + 0.01 * torch.rand(30, 20, generator=generator), torch.zeros(30, dtype=torch.int64))
        for group in (0, 0, 0, 1, 1, 1)
    ]
    for center in (False, True):
        clusters = automatic_clusters(signature_distances(clients, center=center).distances)
        assert clusters.labels.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("features", "labels", "text"),
    [
        (np.zeros((0, 2)), [], "client 3: a client without rows"),
        (np.zeros((2, 2)), [0], r"client 3: labels must be 2 class indices, got torch.int64 \(1,\)"),
        (np.zeros((2, 2)), [0.0, 1.0], "client 3: labels must be 2 class indices, got torch.float32"),
        (np.full((2, 2), np.nan), [0, 1], "client 3: 2 of 2 rows of features hold NaN"),
    ],
)
def test_bad_rows_are_named(features: Any, labels: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        signature(features, labels, "client 3")


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"far_factor": 0.5}, "far_factor"), ({"far_percentile": 0}, "far_percentile"), ({"far_percentile": 101}, "101")],
)
def test_bad_arguments_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        signature_distances(disjoint(2, 2, 0.1), **changes)
    with pytest.raises(ValueError, match="widths"):
        signature_distances([client({0: 1.0}, {0: [1.0]}), client({0: 1.0}, {0: [1.0, 2.0]})])


# -- the number of clusters ----------------------------------------------------------------------------------------


def points(*values: float) -> np.ndarray:
    column = np.array(values)[:, None]
    return np.abs(column - column.T)


def test_the_curve_is_the_silhouette_and_its_top_is_chosen() -> None:
    matrix = points(0, 1, 10, 11, 30, 31, 32, 60)
    found = automatic_clusters(matrix)
    assert set(found.curve) == {2, 3, 4, 5, 6, 7}  # 4 = N/2 was the best of the first window
    assert found.n_clusters == max(found.curve, key=lambda k: found.curve[k])
    assert found.curve[found.n_clusters] == pytest.approx(silhouette_score(matrix, found.labels, metric="precomputed"))
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2, 2, 3]
    between = matrix[np.triu_indices(8, 1)]
    assert found.variation == pytest.approx(between.std() / between.mean())


@pytest.mark.parametrize(("groups", "members"), [(10, 4), (8, 5), (10, 5), (20, 5), (10, 2)])
def test_many_groups_with_disjoint_labels_are_found(groups: int, members: int) -> None:
    """Nearly all distances are the one of clients without a common class, so they vary little; K lies beyond √N."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(2 * groups, 32, generator=generator) + 3
    clients = []
    for group in np.repeat(range(groups), members).tolist():
        y = torch.arange(60) % 2 + 2 * group
        clients.append(signature(base[y] + torch.randn(60, 32, generator=generator), y))
    found = automatic_clusters(signature_distances(clients).distances)
    assert found.variation is not None
    assert found.variation < 0.25
    assert found.n_clusters == groups > np.sqrt(groups * members)
    assert adjusted_rand_score(np.repeat(range(groups), members), found.labels) == 1.0
    assert groups < max(found.curve) <= groups * members - 1
    assert list(found.curve) == list(range(2, max(found.curve) + 1))


def test_the_window_ends_at_one_client_less_than_all() -> None:
    """Two equal clients among others that are equally far from each other: 5 of 6."""
    matrix = np.full((6, 6), 10.0)
    matrix[0, 1] = matrix[1, 0] = 0.0
    np.fill_diagonal(matrix, 0.0)
    found = automatic_clusters(matrix)
    assert found.labels.tolist() == [0, 0, 1, 2, 3, 4]
    assert list(found.curve) == [2, 3, 4, 5]


def test_little_variation_narrows_the_window() -> None:
    rng = np.random.default_rng(0)
    noise = rng.uniform(1, 1.1, (17, 17))
    matrix = np.triu(noise, 1) + np.triu(noise, 1).T
    found = automatic_clusters(matrix)
    assert found.variation is not None
    assert found.variation < 0.25
    assert max(found.curve) == 5


@pytest.mark.parametrize(
    ("matrix", "reason"),
    [
        (np.zeros((1, 1)), "1 clients are too few"),
        (points(0, 5), "2 clients are too few"),
        (np.zeros((3, 3)), "all distances are equal to 0"),
        (np.ones((4, 4)) - np.eye(4), "all distances are equal to 1"),
        (points(0, 1, 2, 3) * 1e-8 + np.ones((4, 4)) - np.eye(4), "all distances are equal to 1"),
    ],
)
def test_one_cluster_comes_with_its_reason(matrix: np.ndarray, reason: str) -> None:
    found = automatic_clusters(matrix)
    assert found.n_clusters == 1
    assert not found.labels.any()
    assert found.reason is not None
    assert reason in found.reason


def test_three_clients_can_be_two_clusters() -> None:
    assert automatic_clusters(points(0, 1, 10)).labels.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("matrix", "text"),
    [
        (np.ones((3, 3)), "0 on the diagonal, got 1.0 for client 0: are these similarities"),
        (np.zeros((2, 3)), "square"),
        (np.array([[0, 1], [2, 0.0]]), "symmetric"),
        (np.array([[0, np.nan], [np.nan, 0]]), "finite"),
        (np.array([[0, -1], [-1, 0.0]]), "at least 0"),
    ],
)
def test_other_matrices_are_refused(matrix: np.ndarray, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        automatic_clusters(matrix)
