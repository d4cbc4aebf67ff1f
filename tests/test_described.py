"""What partitions and transforms say of themselves."""

from __future__ import annotations

import numpy as np
import pytest

import fedclust
from fedclust.described import Described


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (fedclust.Iid(3), "Iid(n_clients=3)"),
        (fedclust.Dirichlet(5, 0.5), "Dirichlet(n_clients=5, alpha=0.5, min_size=1, max_draws=1000)"),
        (fedclust.LabelGroups([[0, 1], [2]]), "LabelGroups(groups=[[0, 1], [2]], clients_per_group=1)"),
        (fedclust.Rotations([0, 90]), "Rotations(degrees=[0.0, 90.0], client_groups=None)"),
    ],
)
def test_an_object_shows_the_call_that_makes_it(made: Described, shown: str) -> None:
    assert repr(made) == shown


def test_long_values_are_cut_and_what_was_not_kept_is_left_out() -> None:
    class Mine(Described):
        def __init__(self, ids: object, forgotten: int = 0) -> None:
            self.ids = ids

    assert len(repr(Mine(np.arange(10_000)))) < 80
    assert Mine("a").describe() == {"class": "Mine", "args": {"ids": "a"}}
