"""Hold-outs, matching test parts and label entropies, with values by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedclust.data.partition import Dirichlet
from fedclust.data.shares import (
    holdout,
    label_entropies,
    matching_test_parts,
    mean_label_entropy,
)


def test_holdout_is_stratified() -> None:
    labels = np.repeat([0, 1], [80, 20])
    picked = holdout(labels, 100, 0.1, np.random.default_rng(0))
    assert np.bincount(labels[picked]).tolist() == [8, 2]


@pytest.mark.parametrize(("n", "share", "size"), [(1, 0.9, 0), (2, 0.9, 1), (4, 0.1, 0), (5, 0.1, 1), (10, 0.0, 0)])
def test_holdout_never_takes_all(n: int, share: float, size: int) -> None:
    for labels in (None, np.zeros(n, dtype=int), np.arange(n)):
        assert len(holdout(labels, n, share, np.random.default_rng(0))) == size


def test_matching_test_parts_by_hand() -> None:
    train = np.array([0, 0, 0, 1, 1, 1, 1, 0])
    parts = [np.array([0, 1, 2, 3]), np.array([4, 5, 6, 7])]  # client 0: three 0 and one 1; client 1: one 0, three 1
    test = np.repeat([0, 1], 8)
    dealt = matching_test_parts(train, parts, test, 0)
    assert [np.bincount(test[part]).tolist() for part in dealt] == [[6, 2], [2, 6]]


@pytest.mark.parametrize("alpha", [1e-2, 0.5, 100.0])
def test_matching_test_parts_are_disjoint_complete_and_in_proportion(alpha: float) -> None:
    rng = np.random.default_rng(0)
    train, test = rng.integers(0, 10, 3000), rng.integers(0, 10, 777)
    parts = Dirichlet(7, alpha, min_size=0).split(train, 0)
    dealt, again = matching_test_parts(train, parts, test, 0), matching_test_parts(train, parts, test, 0)
    assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(777))
    assert all(np.array_equal(a, b) for a, b in zip(dealt, again, strict=True))
    for label in range(10):
        want = np.array([(train[p] == label).sum() for p in parts]) / (train == label).sum() * (test == label).sum()
        assert np.abs(np.array([(test[d] == label).sum() for d in dealt]) - want).max() < 1


def test_matching_test_parts_without_labels_follow_the_sizes() -> None:
    dealt = matching_test_parts(None, [np.arange(30), np.arange(30, 40)], None, 0, n_test=8)
    assert [len(part) for part in dealt] == [6, 2]


def test_matching_test_parts_of_a_label_that_nobody_trains_on() -> None:
    dealt = matching_test_parts(np.zeros(4), [np.arange(3), np.array([3])], np.ones(8), 0)
    assert [len(part) for part in dealt] == [6, 2]


def test_matching_test_parts_refuse_half_labels() -> None:
    with pytest.raises(ValueError, match="both have labels, or neither"):
        matching_test_parts(np.zeros(4), [np.arange(4)], None, 0, n_test=3)
    with pytest.raises(ValueError, match="give n_test"):
        matching_test_parts(None, [np.arange(4)], None, 0)


def test_entropies_by_hand() -> None:
    labels = np.array([0, 0, 0, 1, 0, 1, 2, 3])
    parts = [np.array([0, 1]), np.array([2, 3]), np.array([4, 5, 6, 7]), np.array([], dtype=int)]
    entropies = label_entropies(labels, parts)
    assert entropies[0] == 0.0
    assert entropies[1] == pytest.approx(np.log(2))
    assert entropies[2] == pytest.approx(np.log(4))
    assert entropies[3] is None
    assert mean_label_entropy(labels, parts) == pytest.approx(np.log(2))
    with pytest.raises(ValueError, match="no client has rows"):
        mean_label_entropy(labels, [np.array([], dtype=int)])
