"""Shuffling: every column keeps its values within its group, columns are independent, permutations equally likely."""

from __future__ import annotations

import math
import warnings
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedclust.privacy import shuffling
from fedclust.privacy.randomness import SimulatedRandom
from fedclust.privacy.shuffling import shuffle_coordinates

pytestmark = pytest.mark.filterwarnings("ignore:simulated noise")


def simulated(seed: int = 0) -> SimulatedRandom:
    return SimulatedRandom(seed, 0, "management server", "shuffle")


def tagged(users: int, d: int) -> Tensor:
    """user · 10 + coordinate, as the story has it (1000 where there are more coordinates)."""
    return torch.arange(users)[:, None] * (10.0 if d <= 10 else 1000.0) + torch.arange(d)


def test_a_group_of_two_and_a_group_of_one() -> None:
    matrix = tagged(3, 4)
    seen = set()
    for seed in range(40):
        with pytest.warns(UserWarning, match=r"rows \[1\] are alone in their group: no amplification"):
            shuffled, alone = shuffle_coordinates(matrix, [5, 2, 5], simulated(seed))
        assert alone == [1]
        assert shuffled[1].tolist() == matrix[1].tolist()
        for j in range(4):
            assert sorted(shuffled[[0, 2], j].tolist()) == [j, 20 + j]
        seen.add(tuple((shuffled[0] > 10).tolist()))
    # Columns are permuted independently: most of the 16 patterns turn up, not only the two of whole rows.
    assert len(seen) > 10
    assert torch.equal(matrix, tagged(3, 4))


def test_sums_means_and_values_stay_in_their_groups() -> None:
    groups = torch.tensor([0, 1, 0, 2, 1, 0, 2, 2, 2, 1])
    matrix = tagged(10, 500)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shuffled, alone = shuffle_coordinates(matrix, groups, simulated())
    assert alone == []
    assert not torch.equal(shuffled, matrix)
    for group in range(3):
        rows = groups == group
        assert torch.equal(shuffled[rows].sort(dim=0).values, matrix[rows])
        assert torch.equal(shuffled[rows].sum(0), matrix[rows].sum(0))


@pytest.mark.parametrize("users", [2, 3, 4])
def test_all_permutations_are_equally_likely(users: int) -> None:
    d = 24_000
    shuffled, _ = shuffle_coordinates(torch.arange(users).float()[:, None].repeat(1, d), [0] * users, simulated())
    orders = [tuple(column) for column in shuffled.T.int().tolist()]
    kinds = list(permutations(range(users)))
    expected = d / len(kinds)
    counts = np.array([orders.count(kind) for kind in kinds])
    assert counts.sum() == d
    statistic = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(kinds) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_neighbouring_columns_are_independent() -> None:
    d = 20_000
    shuffled, _ = shuffle_coordinates(torch.tensor([[-1.0], [1.0]]).repeat(1, d), [0, 0], simulated())
    signs = shuffled[0].numpy()
    for lag in (1, 2, 7):
        # Standard error 1/√d.
        assert abs(float((signs[lag:] * signs[:-lag]).mean())) < 5 / math.sqrt(d)


def test_pieces_change_nothing_about_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffling, "_ELEMENTS_AT_ONCE", 10)
    matrix = tagged(4, 57)
    shuffled, _ = shuffle_coordinates(matrix, [0] * 4, simulated())
    assert torch.equal(shuffled.sort(dim=0).values, matrix)
    assert (shuffled != matrix).float().mean() > 0.5
    assert (shuffled[:, -1] != matrix[:, -1]).any() or (shuffled[:, -2] != matrix[:, -2]).any()


def test_secure_by_default_and_repeatable_on_request() -> None:
    matrix = tagged(5, 200)
    assert not torch.equal(shuffle_coordinates(matrix, [0] * 5)[0], shuffle_coordinates(matrix, [0] * 5)[0])
    first, second = (shuffle_coordinates(matrix, [0] * 5, simulated(3))[0] for _ in range(2))
    assert torch.equal(first, second)


def test_types_are_kept() -> None:
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        shuffled, _ = shuffle_coordinates(torch.tensor([[1, 2], [3, 4]], dtype=dtype), [0, 0], simulated())
        assert shuffled.dtype == dtype
        assert shuffled.sort(dim=0).values.tolist() == [[1, 2], [3, 4]]


def test_edge_sizes() -> None:
    assert shuffle_coordinates(torch.zeros(3, 0), [0, 0, 0])[0].shape == (3, 0)
    assert shuffle_coordinates(torch.zeros(0, 4), np.zeros(0, dtype=int))[1] == []
    with pytest.warns(UserWarning, match=r"rows \[0, 1\]"):
        shuffled, alone = shuffle_coordinates(tagged(2, 3), [1, 0])
    assert alone == [0, 1]
    assert torch.equal(shuffled, tagged(2, 3))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(users, coordinates\), got \(3,\)"):
        shuffle_coordinates(torch.zeros(3), [0, 0, 0])
    for groups in ([0, 0], [0.0, 0.0, 1.0], [[0], [0], [0]]):
        with pytest.raises(ValueError, match="one integer for each of 3 rows"):
            shuffle_coordinates(torch.zeros(3, 2), groups)
