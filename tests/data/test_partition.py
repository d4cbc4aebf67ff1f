"""Partitions: failure stories A1 to A6, and the contract that all partitions share."""

from __future__ import annotations

import time
import warnings

import numpy as np
import pytest

from fedclust.data.partition import Dirichlet, Iid, LabelGroups, Natural, Partition, Shards
from fedclust.data.shares import mean_label_entropy


def labels_of(n: int, n_classes: int = 10) -> np.ndarray:
    return np.random.default_rng(7).integers(0, n_classes, size=n)


def assert_complete(parts: list[np.ndarray], n: int) -> None:
    """A4: disjoint, together exactly range(n), sorted int64."""
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert sum(len(part) for part in parts) == n
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


def everyone() -> list[Partition]:
    return [
        Iid(6),
        Dirichlet(6, 0.5),
        LabelGroups([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [0, 9]], 2),
        Shards(6, 2),
        Natural(np.arange(300) % 6),
    ]


@pytest.mark.parametrize("partition", everyone(), ids=lambda p: type(p).__name__)
class TestEveryPartition:
    def test_parts_are_disjoint_and_complete(self, partition: Partition) -> None:
        parts = partition.split(labels_of(300), seed=0)
        assert len(parts) == partition.n_clients == 6
        assert_complete(parts, 300)

    def test_same_seed_same_parts(self, partition: Partition) -> None:
        first, again = partition.split(labels_of(300), 5), partition.split(labels_of(300), 5)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))

    def test_another_seed_deals_differently(self, partition: Partition) -> None:
        first, other = partition.split(labels_of(300), 0), partition.split(labels_of(300), 1)
        equal = all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
        assert equal == isinstance(partition, Natural)

    def test_names_and_description(self, partition: Partition) -> None:
        assert partition.names() == [str(client) for client in range(6)]
        assert partition.describe()["class"] == type(partition).__name__

    def test_bad_calls_are_refused(self, partition: Partition) -> None:
        missing = "deals rows by label" if partition.needs_labels else "without labels, give"
        with pytest.raises(ValueError, match="300 labels for 10 rows"):
            partition.split(labels_of(300), 0, n_rows=10)
        with pytest.raises(ValueError, match=missing):
            partition.split(None, 0)
        with pytest.raises(ValueError, match="one per row"):
            partition.split(np.zeros((300, 2)), 0)
        for seed in (True, -1, 0.5, "0"):
            with pytest.raises(ValueError, match="seed must be a whole number"):
                partition.split(labels_of(300), seed)  # type: ignore[arg-type]

    def test_without_labels(self, partition: Partition) -> None:
        if partition.needs_labels:
            with pytest.raises(ValueError, match="has no labels; use Iid"):
                partition.split(None, 0, n_rows=300)
        else:
            assert_complete(partition.split(None, 0, n_rows=300), 300)


@pytest.mark.parametrize("alpha", [1e-3, 0.5, 1000.0])
@pytest.mark.parametrize("n_clients", [1, 3, 10])
@pytest.mark.parametrize("n", [1, 7, 100, 1001])
def test_dirichlet_loses_and_shares_no_row(n: int, n_clients: int, alpha: float) -> None:
    """A4."""
    for seed in range(3):
        parts = Dirichlet(n_clients, alpha, min_size=0).split(labels_of(n), seed)
        assert len(parts) == n_clients
        assert_complete(parts, n)


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-12, 1e12, 1e300])
def test_dirichlet_at_extreme_alpha(alpha: float) -> None:
    assert_complete(Dirichlet(4, alpha, min_size=0).split(labels_of(200), 0), 200)


def test_dirichlet_at_alpha_1000_is_nearly_iid() -> None:
    """A4: label shares within 5 percentage points of the global ones."""
    labels = labels_of(1001)
    overall = np.bincount(labels, minlength=10) / 1001
    for part in Dirichlet(3, 1000.0).split(labels, 0):
        assert np.abs(np.bincount(labels[part], minlength=10) / len(part) - overall).max() < 0.05


def test_dirichlet_impossible_min_size_is_refused_before_drawing() -> None:
    """A1, first case."""
    partition = Dirichlet(20, 0.01, min_size=10, max_draws=10**9)
    with pytest.raises(ValueError, match="Dirichlet: 60 rows cannot") as caught:
        partition.split(np.arange(60) % 3, 0)
    for needed in ("60 rows", "20 clients", "min_size=10", "200 rows are needed"):
        assert needed in str(caught.value)


def test_dirichlet_hopeless_min_size_ends_soon() -> None:
    """A1, second case."""
    start = time.perf_counter()
    with pytest.raises(ValueError, match="Dirichlet: no draw in 1000") as caught:
        Dirichlet(100, 0.01, min_size=10).split(np.arange(2000) % 10, 0)
    assert time.perf_counter() - start < 5
    for needed in ("alpha=0.01", "min_size=10", "smallest client had 0", "Raise alpha"):
        assert needed in str(caught.value)


def test_dirichlet_is_fast() -> None:
    labels = labels_of(60_000)
    start = time.perf_counter()
    Dirichlet(100, 0.5).split(labels, 0)
    assert time.perf_counter() - start < 2


def test_dirichlet_min_size_holds() -> None:
    """A3: the default leaves no client empty; min_size is kept."""
    labels = labels_of(200)
    for seed in range(20):
        assert min(len(part) for part in Dirichlet(5, 0.1).split(labels, seed)) >= 1
        assert min(len(part) for part in Dirichlet(5, 0.5, min_size=10).split(labels, seed)) >= 10


def test_dirichlet_may_leave_clients_empty_only_if_asked() -> None:
    """A3: 50 rows, 10 clients, alpha 1e-3."""
    parts = Dirichlet(10, 1e-3, min_size=0).split(labels_of(50, 3), 0)
    assert min(len(part) for part in parts) == 0
    with pytest.raises(ValueError, match="min_size=1"):
        Dirichlet(10, 1e-3).split(np.zeros(50, dtype=int), 0)


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), float("inf"), "0.5", True, None])
def test_dirichlet_refuses_alpha(alpha: object) -> None:
    """A5: at construction, naming alpha."""
    with pytest.raises(ValueError, match="alpha must be a"):
        Dirichlet(5, alpha)  # type: ignore[arg-type]


def test_dirichlet_says_how_to_ask_for_one_label_clients() -> None:
    with pytest.raises(ValueError, match="LabelGroups or Shards"):
        Dirichlet(5, 0)


def test_entropy_rises_with_alpha() -> None:
    """A6."""
    labels = labels_of(5000)
    low, middle, high = (mean_label_entropy(labels, Dirichlet(10, a).split(labels, 0)) for a in (0.1, 1.0, 1000.0))
    assert low < middle < high <= np.log(10)
    assert "larger alpha means less skew" in (Dirichlet.__doc__ or "")


@pytest.mark.parametrize("n_clients", [0, -1, True, 2.0, "3", None])
def test_bad_client_numbers_are_refused(n_clients: object) -> None:
    for build in (Iid, Shards, lambda n: Dirichlet(n, 0.5), lambda n: LabelGroups([[0]], n)):
        with pytest.raises(ValueError, match=r"(n_clients|clients_per_group) must be a whole number of at least 1"):
            build(n_clients)


def test_other_bad_arguments_are_refused() -> None:
    for kwargs in ({"min_size": -1}, {"min_size": 1.0}, {"max_draws": 0}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            Dirichlet(3, 0.5, **kwargs)
    with pytest.raises(ValueError, match="shards_per_client"):
        Shards(3, 0)
    for groups in ([], "01", [[]], [[0, 0]], [["a"]], [0], [[-1]], None):
        with pytest.raises(ValueError, match="groups"):
            LabelGroups(groups)  # type: ignore[arg-type]


def test_iid_sizes_differ_by_at_most_one() -> None:
    assert sorted(len(part) for part in Iid(3).split(None, 0, n_rows=11)) == [3, 4, 4]
    with pytest.raises(ValueError, match="3 clients need at least 3 rows, got 2"):
        Iid(3).split(None, 0, n_rows=2)


def test_label_groups_by_hand() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2, 2, 2])
    partition = LabelGroups([[0, 1], [2]], clients_per_group=2)
    parts = partition.split(labels, 0)
    assert [sorted(labels[part].tolist()) for part in parts] == [[0, 1], [0, 1], [2, 2], [2, 2]]
    assert partition.groups().tolist() == [0, 0, 1, 1]
    assert partition.describe()["args"] == {"groups": [[0, 1], [2]], "clients_per_group": 2}


def test_label_groups_must_fit_the_data() -> None:
    with pytest.raises(ValueError, match=r"labels \[2\] of the data are in no group"):
        LabelGroups([[0], [1]]).split(np.array([0, 1, 2]), 0)
    with pytest.raises(ValueError, match=r"labels \[3\] are in a group but not in the data"):
        LabelGroups([[0], [3]]).split(np.array([0, 0]), 0)
    with pytest.raises(ValueError, match="would get no row"):
        LabelGroups([[0], [1]], clients_per_group=3).split(np.array([0, 0, 0, 1, 1]), 0)


def test_label_groups_share_a_label_evenly() -> None:
    labels = np.repeat([0, 1, 2], 40)
    sizes = [np.bincount(labels[p], minlength=3).tolist() for p in LabelGroups([[0, 1], [1, 2]]).split(labels, 0)]
    assert sizes == [[40, 20, 0], [0, 20, 40]]


def test_shards_by_hand() -> None:
    labels = np.array([0, 1] * 20)
    for part in Shards(4, 1).split(labels, 0):
        assert len(part) == 10
        assert len(set(labels[part].tolist())) == 1
    with pytest.raises(ValueError, match="2 clients x 3 shards need at least 6 rows, got 5"):
        Shards(2, 3).split(np.zeros(5), 0)


def test_shards_cut_labels_into_at_most_two_per_shard() -> None:
    labels = labels_of(1000)
    for part in Shards(10, 2).split(labels, 0):
        assert len(np.unique(labels[part])) <= 4


def test_natural_keeps_names() -> None:
    partition = Natural(["c20", "c10", "c20"])
    assert partition.names() == ["c10", "c20"]
    assert [part.tolist() for part in partition.split(None, 0, n_rows=3)] == [[1], [0, 2]]
    with pytest.raises(ValueError, match="3 ids for 4 rows"):
        partition.split(None, 0, n_rows=4)


def test_natural_without_ids_takes_those_of_the_source() -> None:
    with pytest.raises(ValueError, match="no client ids"):
        Natural().split(None, 0, n_rows=3)
    with pytest.raises(ValueError, match="no client ids"):
        _ = Natural().n_clients
    assert Natural().for_source(np.array([4, 4, 2])).n_clients == 2
    for ids in ([0.5, 1.5], [[1, 2]], []):
        with pytest.raises(ValueError, match="ids must be"):
            Natural(ids)


def test_string_labels_work() -> None:
    labels = np.array(["cat", "dog"] * 50)
    for partition in (Dirichlet(3, 1.0), Shards(3, 2), Iid(3)):
        assert_complete(partition.split(labels, 0), 100)


def test_permuted_rows_give_the_same_sizes() -> None:
    """The counts depend on how often each label occurs, not on the order of the rows."""
    labels = labels_of(500)
    order = np.random.default_rng(1).permutation(500)
    plain, permuted = Dirichlet(4, 0.3).split(labels, 0), Dirichlet(4, 0.3).split(labels[order], 0)
    for a, b in zip(plain, permuted, strict=True):
        assert np.array_equal(np.sort(labels[a]), np.sort(labels[order][b]))


def test_no_warning_from_numpy() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dirichlet(10, 1e-3, min_size=0).split(labels_of(50), 0)
