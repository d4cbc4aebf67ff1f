"""What a server can compute from sums of which it knows who is in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclust.algorithms.flameche_sums import combinations, survivors_only, without_exposure
from fedclust.privacy.aggregation import TooFewClients
from fedclust.privacy.exposure import determined, extended

NOTHING = torch.empty(0, 4, dtype=torch.float64)


def test_sums_that_differ_by_one_vector_determine_it() -> None:
    known = extended(NOTHING, torch.tensor([[1, 1, 1, 0]]))
    assert determined(known) == []
    assert determined(extended(known, torch.tensor([[1, 1, 0, 0]]))) == [2]
    assert determined(extended(known, torch.tensor([[0, 0, 0, 1]]))) == [3]


def test_three_sums_of_two_determine_all_three() -> None:
    pairs = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]])
    assert determined(extended(NOTHING, pairs[:2])) == []
    assert determined(extended(NOTHING, pairs)) == [0, 1, 2]


def test_what_is_known_twice_adds_nothing() -> None:
    rows = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    known = extended(extended(NOTHING, rows), rows)
    assert known.shape == (2, 4)
    assert torch.allclose(known @ known.T, torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_the_ranks_of_the_system(seed: int) -> None:
    """Independent: a vector is determined where its unit row does not raise the rank."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    rows = rng.integers(-1, 2, (int(rng.integers(1, n + 1)), n))
    rank = np.linalg.matrix_rank(rows)
    expected = [i for i in range(n) if np.linalg.matrix_rank(np.vstack([rows, np.eye(n)[i]])) == rank]
    half = len(rows) // 2
    first = extended(torch.empty(0, n, dtype=torch.float64), torch.from_numpy(rows[:half]))
    assert determined(extended(first, torch.from_numpy(rows[half:]))) == expected


def slots_of(*values: int) -> torch.Tensor:
    return torch.tensor([values])


def test_a_client_alone_in_a_new_slot_is_held_back() -> None:
    slots, held = without_exposure(NOTHING, slots_of(-1, -1, -1, -1), slots_of(0, 0, 0, 1), 2)
    assert (slots.tolist(), held) == ([[0, 0, 0, -1]], [3])


@pytest.mark.parametrize(
    ("after", "held"),
    [
        ((1, 0, 0, 1, 1, 1), [0]),  # what leaves slot 0 would be client 0
        ((1, 1, 0, 1, 1, 1), [0, 1]),  # what remains in it would be client 2
        ((1, 0, 0, 0, 1, 1), []),  # an exchange tells a difference of two
        ((1, 1, 1, 0, 0, 0), []),
    ],
)
def test_later_moves_count_together_with_the_sums_before(after: tuple[int, ...], held: list[int]) -> None:
    before = slots_of(0, 0, 0, 1, 1, 1)
    nothing = torch.empty(0, 6, dtype=torch.float64)
    known = extended(nothing, combinations(slots_of(*[-1] * 6), before, 2))
    moved, kept = without_exposure(known, before, slots_of(*after), 2)
    assert kept == held
    expected = before if held else slots_of(*after)
    assert torch.equal(moved, expected)


def test_several_starts_together_expose_more_than_each_alone() -> None:
    none, one, two = slots_of(-1, -1, -1), slots_of(0, 0, 1), slots_of(0, 1, 1)
    nothing = torch.empty(0, 3, dtype=torch.float64)
    before, after = torch.cat([none, none]), torch.cat([one, two])
    assert determined(extended(nothing, combinations(before, after, 2))) == [0, 1, 2]
    moved, held = without_exposure(nothing, before, after, 2)
    assert held == [0, 1, 2]
    assert torch.equal(moved, before)


def test_a_sum_is_refused_when_those_who_are_left_would_be_exposed() -> None:
    check = survivors_only(NOTHING, combinations(slots_of(-1, -1, -1, -1), slots_of(0, 0, 1, 1), 2))
    check([0, 1, 2, 3])
    check([0, 1])
    with pytest.raises(TooFewClients, match=r"clients \[0, 1, 2\] would give away the data of \[2\]"):
        check([0, 1, 2])
