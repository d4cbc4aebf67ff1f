"""Feature shift and concept shift per client."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclust.data.tables import Table
from fedclust.data.transforms import LabelSwaps, Rotations


def table_of(x: torch.Tensor, y: list[int] | None = None) -> Table:
    return Table(x, None if y is None else torch.tensor(y), np.arange(len(x)))


def test_quarter_turns_are_exact_and_counter_clockwise() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 1, 2, 2)
    rotations = Rotations()
    turned = [rotations.apply(client, table_of(x)).x.flatten().tolist() for client in range(5)]
    assert turned == [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2], [1, 2, 3, 4]]
    assert Rotations([-90.0]).apply(0, table_of(x)).x.flatten().tolist() == [3, 1, 4, 2]
    assert x.flatten().tolist() == [1, 2, 3, 4]


def test_other_angles_turn_the_same_way() -> None:
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, 8] = 1.0  # to the right of the centre; counter-clockwise it moves up
    almost, exact = (Rotations([angle]).apply(0, table_of(x)).x[0, 0] for angle in (89.9, 90.0))
    assert exact[0, 4] == 1.0
    assert almost[0, 4] > 0.9
    half = Rotations([45.0]).apply(0, table_of(torch.rand(3, 2, 9, 9))).x
    assert half.shape == (3, 2, 9, 9)
    assert 0.0 <= float(half.min()) <= float(half.max()) <= 1.0


def test_rotations_refuse_what_they_cannot_turn() -> None:
    with pytest.raises(ValueError, match=r"needs images \(channels, height, width\), got rows of shape \(4,\)"):
        Rotations().apply(0, table_of(torch.zeros(1, 4)))
    with pytest.raises(ValueError, match="needs square images"):
        Rotations().check((1, 2, 3), None)
    Rotations([0.0, 180.0]).check((1, 2, 3), None)
    for degrees in ([], "90", [float("nan")], [float("inf")], ["90"], [True]):
        with pytest.raises(ValueError, match="degrees must be"):
            Rotations(degrees)  # type: ignore[arg-type]


def test_swaps_by_hand() -> None:
    swaps = LabelSwaps([[], [(0, 1)], [(0, 2), (1, 3)]])
    table = table_of(torch.zeros(4, 2), [0, 1, 2, 3])
    swapped = [swaps.apply(client, table).y.tolist() for client in range(4)]  # type: ignore[union-attr]
    assert swapped == [[0, 1, 2, 3], [1, 0, 2, 3], [2, 3, 0, 1], [0, 1, 2, 3]]
    assert table.y is not None
    assert table.y.tolist() == [0, 1, 2, 3]


def test_swaps_refuse_what_they_cannot_swap() -> None:
    with pytest.raises(ValueError, match="needs labels"):
        LabelSwaps([[(0, 1)]]).check((2,), None)
    with pytest.raises(ValueError, match="needs labels"):
        LabelSwaps([[(0, 1)]]).apply(0, table_of(torch.zeros(1, 2)))
    with pytest.raises(ValueError, match=r"names label 5, the data has labels 0\.\.2"):
        LabelSwaps([[(0, 5)]]).check((2,), 3)
    for pairs in ([], [[(0, 1, 2)]], [[(0, 1), (1, 2)]], [[(0, 0)]], [[("a", 1)]], [(0, 1)], [[(-1, 1)]], None):
        with pytest.raises(ValueError, match="pairs"):
            LabelSwaps(pairs)  # type: ignore[arg-type]


def test_planted_groups() -> None:
    assert Rotations([0.0, 90.0, 180.0]).groups(5).tolist() == [0, 1, 2, 0, 1]
    given = LabelSwaps([[], [(0, 1)]], client_groups=[1, 1, 0])
    assert given.groups(3).tolist() == [1, 1, 0]
    assert given.describe() == {"class": "LabelSwaps", "args": {"pairs": [[], [[0, 1]]], "client_groups": [1, 1, 0]}}
    with pytest.raises(ValueError, match="3 entries for 4 clients"):
        given.groups(4)
    with pytest.raises(ValueError, match="client 3 has none"):
        given.group_of(3)
    with pytest.raises(ValueError, match=r"client_groups must lie in 0\.\.1"):
        LabelSwaps([[], [(0, 1)]], client_groups=[2])
