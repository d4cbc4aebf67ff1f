"""Cohorts and batches: who takes part, and which rows make up a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedclust.federation.batches import Cycle, gathered, shuffled_batches
from fedclust.federation.cohort import Cohorts

CLIENTS = [0, 2, 3, 7, 9, 11]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 9, 33, 64, 65])
@pytest.mark.parametrize("size", [1, 2, 8, 32])
def test_batches_cover_every_row_once(n: int, size: int) -> None:
    batches = list(shuffled_batches(n, size, generator()))
    assert sorted(torch.cat(batches).tolist()) == list(range(n))
    lengths = [len(batch) for batch in batches]
    assert all(length == size for length in lengths[:-1])
    assert lengths[-1] <= size + (size > 1)
    if size > 1 and n > 1:
        assert min(lengths) >= 2


def test_batches_are_a_function_of_the_generator_and_change_from_epoch_to_epoch() -> None:
    one, two = generator(3), generator(3)
    first = torch.cat(list(shuffled_batches(20, 8, one)))
    assert torch.equal(first, torch.cat(list(shuffled_batches(20, 8, two))))
    assert not torch.equal(first, torch.cat(list(shuffled_batches(20, 8, one))))
    assert not torch.equal(first, torch.arange(20))


@pytest.mark.parametrize("counts", [[3, 3, 4], [10], [25], [1] * 30, [0, 7, 13]])
def test_a_cycle_repeats_a_row_only_after_all_others(counts: list[int]) -> None:
    cycle = Cycle(10, generator())
    drawn = torch.cat([cycle.take(count) for count in counts]).tolist()
    assert len(drawn) == sum(counts)
    for start in range(0, len(drawn), 10):
        passed = drawn[start : start + 10]
        assert len(set(passed)) == len(passed)
        assert set(passed) <= set(range(10))


def test_a_cycle_over_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0 rows"):
        Cycle(0, generator())


@pytest.mark.parametrize(
    "options",
    [
        {"cohort_size": 0}, {"cohort_size": -1}, {"cohort_size": True}, {"cohort_size": 1.5}, {"participation": 0.0},
        {"participation": -0.1}, {"participation": 1.1}, {"participation": float("nan")},
        {"cohort_size": 2, "participation": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"cohort_size|participation"):
        Cohorts(**options)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 6), ({"cohort_size": 6}, 6), ({"cohort_size": 1}, 1), ({"participation": 1.0}, 6),
        ({"participation": 0.5}, 3), ({"participation": 0.25}, 2), ({"participation": 0.01}, 1),
        ({"participation": 1 / 3}, 2),
    ],
    ids=str,
)  # fmt: skip
def test_sizes_and_membership(options: dict[str, Any], size: int) -> None:
    for number in range(1, 20):
        cohort = Cohorts(**options).draw(CLIENTS, 0, number)
        assert len(cohort) == size
        assert cohort == sorted(set(cohort))
        assert set(cohort) <= set(CLIENTS)


def test_cohorts_depend_on_seed_and_round_and_on_nothing_else() -> None:
    cohorts = Cohorts(cohort_size=2)
    forwards = [cohorts.draw(CLIENTS, 0, number) for number in range(1, 30)]
    backwards = [cohorts.draw(CLIENTS, 0, number) for number in range(29, 0, -1)]
    assert forwards == backwards[::-1]
    assert forwards != [cohorts.draw(CLIENTS, 1, number) for number in range(1, 30)]
    assert {client for cohort in forwards for client in cohort} == set(CLIENTS)
    assert len({tuple(cohort) for cohort in forwards}) > 5


def test_too_few_clients_are_refused_with_both_numbers() -> None:
    Cohorts(cohort_size=3).check(3)
    Cohorts(participation=0.01).check(1)
    with pytest.raises(ValueError, match=r"cohort_size is 5, but only 3"):
        Cohorts(cohort_size=5).check(3)
    with pytest.raises(ValueError, match=r"no client holds any training row"):
        Cohorts().check(0)


def test_gathered_rows_are_those_of_their_tables_and_share_no_memory() -> None:
    one, other = torch.rand(7, 3, 2), torch.rand(5, 3, 2)
    rows, others = torch.tensor([6, 0, 6]), torch.tensor([4])
    both = gathered((one, rows), (other, others))
    assert torch.equal(both, torch.cat([one[rows], other[others]]))
    assert torch.equal(gathered((one, rows)), one[rows])
    both.zero_()
    assert one.min() > 0


def test_gathered_refuses_rows_that_are_not_there() -> None:
    with pytest.raises(IndexError, match="out of range"):
        gathered((torch.rand(4, 2), torch.tensor([1])), (torch.rand(4, 2), torch.tensor([4])))


def test_gathered_images_stay_channels_last() -> None:
    images = torch.rand(5, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    rows = torch.tensor([3, 1])
    assert torch.equal(gathered((images, rows)), images[rows])
    assert gathered((images, rows)).is_contiguous(memory_format=torch.channels_last)
