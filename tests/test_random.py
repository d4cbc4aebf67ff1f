"""Seeds: one number for every (seed, parts), the same on every machine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fedclust.random import numpy_generator, seed_for, torch_generator

PINNED = (2718509303608613306, 8085073679910973062)  # seed_for(0, "init"), seed_for(0, 1, "client 2", "batches")


def test_values_are_pinned_so_that_no_release_changes_them_unnoticed() -> None:
    assert seed_for(0, "init") == PINNED[0]
    assert seed_for(0, 1, "client 2", "batches") == PINNED[1]
    assert seed_for(np.int64(0), "init") == PINNED[0]


def test_every_part_counts_and_so_do_order_type_and_grouping() -> None:
    parts = [
        (),
        (0,),
        (1,),
        ("0",),
        ("1",),
        (0, 1),
        (1, 0),
        (0, "1"),
        ("01",),
        ("0", "1"),
        ("",),
        ("", ""),
        (-1,),
        (10,),
    ]
    seeds = [seed_for(seed, *part) for seed, part in itertools.product((0, 1, 2**40), parts)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_generators_repeat_and_differ_by_purpose(seed: int) -> None:
    for make, draw in (
        (numpy_generator, lambda g: g.random(4).tolist()),
        (torch_generator, lambda g: torch.rand(4, generator=g).tolist()),
    ):
        assert draw(make(seed, 1, "a")) == draw(make(seed, 1, "a"))
        others = [draw(make(seed, 1, "b")), draw(make(seed, 2, "a")), draw(make(seed + 1, 1, "a"))]
        assert all(other != draw(make(seed, 1, "a")) for other in others)


def test_global_generators_are_neither_read_nor_moved() -> None:
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = torch.rand(3, generator=torch_generator(0, "x")), numpy_generator(0, "x").random(3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    torch.manual_seed(6)
    assert torch.equal(torch.rand(3, generator=torch_generator(0, "x")), first[0])
    assert np.array_equal(numpy_generator(0, "x").random(3), first[1])
