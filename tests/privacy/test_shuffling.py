"""Shuffling: every column keeps its values within its group, columns are independent, permutations equally likely."""

from __future__ import annotations

import math
import warnings
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from fedclust.privacy import randomness
from fedclust.privacy.randomness import SecureRandom, SimulatedRandom
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
        source = simulated(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shuffled, alone = shuffle_coordinates(matrix, [5, 2, 5], source)
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
    shuffled, alone = shuffle_coordinates(matrix, groups, simulated())
    assert alone == []
    assert not torch.equal(shuffled, matrix)
    for group in range(3):
        rows = groups == group
        assert torch.equal(shuffled[rows].sort(dim=0).values, matrix[rows])
        assert torch.equal(shuffled[rows].sum(0), matrix[rows].sum(0))


def orders(users: int, d: int, seed: int = 0) -> np.ndarray:
    """(d,) which of the permutations of that many rows each column got."""
    shuffled, _ = shuffle_coordinates(torch.arange(users).float()[:, None].repeat(1, d), [0] * users, simulated(seed))
    places = users ** np.arange(users)
    kinds = np.sort(np.array(list(permutations(range(users)))) @ places)
    codes = places @ shuffled.numpy().astype(np.int64)
    found = np.searchsorted(kinds, codes)
    assert (kinds[found] == codes).all()
    return found


@pytest.mark.parametrize("users", [2, 3, 4])
def test_all_permutations_are_equally_likely(users: int) -> None:
    d, kinds = 480_000, math.factorial(users)
    counts = np.bincount(orders(users, d), minlength=kinds)
    statistic = float(((counts - d / kinds) ** 2 / (d / kinds)).sum())
    assert statistic < chi2.isf(0.001, kinds - 1)


def test_neighbouring_columns_are_independent() -> None:
    d = 360_000
    found = orders(3, d)
    for lag in (1, 2, 7):
        pairs = np.bincount(6 * found[lag:] + found[:-lag], minlength=36)
        expected = (d - lag) / 36
        assert float(((pairs - expected) ** 2 / expected).sum()) < chi2.isf(0.001, 35)


def test_rows_of_large_groups_go_everywhere() -> None:
    # More than 256 rows: a draw takes four bytes.
    users, d = 300, 2000
    matrix = torch.arange(users, dtype=torch.int16)[:, None].repeat(1, d)
    shuffled, _ = shuffle_coordinates(matrix, [0] * users, simulated())
    assert torch.equal(shuffled.sort(dim=0).values, matrix)
    for row in (0, 255, 256, 299):
        counts = np.bincount(shuffled[row].numpy() // 30, minlength=10)
        assert float(((counts - d / 10) ** 2 / (d / 10)).sum()) < chi2.isf(0.0001, 9)


@pytest.mark.parametrize("words", [1, 2, 50])
def test_results_do_not_depend_on_where_buffers_end(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    groups = [0] * 5 + [1] * 300 + [2, 2, 3]
    matrix = tagged(len(groups), 40)
    usual, alone = shuffle_coordinates(matrix, groups, simulated())
    monkeypatch.setattr(randomness, "_WORDS_AT_ONCE", words)
    assert torch.equal(shuffle_coordinates(matrix, groups, simulated())[0], usual)
    assert alone == [307]


def test_few_random_bytes_are_needed() -> None:
    asked = []

    class Counting:
        def words(self, count: int) -> np.ndarray:
            asked.append(count)
            return SecureRandom().words(count)

    shuffle_coordinates(torch.zeros(20, 50_000), np.arange(20) // 4, Counting())
    # Five groups, three draws of a byte each; one in 256 is refused for three rows.
    assert 5 * 3 * 50_000 <= 4 * sum(asked) < 1.02 * 5 * 3 * 50_000


def test_in_place_and_into_given_room() -> None:
    groups = [0, 0, 1, 0]
    usual, _ = shuffle_coordinates(tagged(4, 300), groups, simulated())
    matrix = tagged(4, 300)
    result, alone = shuffle_coordinates(matrix, groups, simulated(), out=matrix)
    assert result is matrix
    assert torch.equal(matrix, usual)
    assert alone == [2]
    wide = torch.zeros(300, 4).T
    for out in (torch.zeros(4, 300), wide):
        result, _ = shuffle_coordinates(tagged(4, 300), groups, simulated(), out=out)
        assert result is out
        assert torch.equal(out, usual)
    turned = tagged(4, 300).T.contiguous().T
    shuffle_coordinates(turned, groups, simulated(), out=turned)
    assert torch.equal(turned, usual)
    for out in (torch.zeros(4, 299), torch.zeros(4, 300, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"out must be like the matrix, \(4, 300\) of torch\.float32"):
            shuffle_coordinates(tagged(4, 300), groups, out=out)


def test_secure_by_default_and_repeatable_on_request() -> None:
    matrix = tagged(5, 200)
    assert not torch.equal(shuffle_coordinates(matrix, [0] * 5)[0], shuffle_coordinates(matrix, [0] * 5)[0])
    first, second = (shuffle_coordinates(matrix, [0] * 5, simulated(3))[0] for _ in range(2))
    assert torch.equal(first, second)


def test_types_are_kept() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int64):
        shuffled, _ = shuffle_coordinates(torch.tensor([[1, 2], [3, 4]], dtype=dtype), [0, 0], simulated())
        assert shuffled.dtype == dtype
        assert shuffled.sort(dim=0).values.tolist() == [[1, 2], [3, 4]]
    pairs = torch.tensor([[1 + 2j, 3], [4, 5j]], dtype=torch.complex64)
    shuffled, _ = shuffle_coordinates(pairs, [0, 0], simulated())
    assert {shuffled[0, 0].item(), shuffled[1, 0].item()} == {1 + 2j, 4}
    odd = torch.tensor([[float("nan"), -0.0]] * 2)
    shuffled, _ = shuffle_coordinates(odd, [0, 0], simulated())
    assert torch.equal(shuffled.view(torch.int32), odd.view(torch.int32))


def test_gradients_are_left_behind() -> None:
    matrix = tagged(3, 5).requires_grad_()
    shuffled, _ = shuffle_coordinates(matrix, [0, 0, 0], simulated())
    assert not shuffled.requires_grad


def test_edge_sizes() -> None:
    assert shuffle_coordinates(torch.zeros(3, 0), [0, 0, 0])[0].shape == (3, 0)
    assert shuffle_coordinates(torch.zeros(0, 4), np.zeros(0, dtype=int))[1] == []
    shuffled, alone = shuffle_coordinates(tagged(2, 3), [1, 0])
    assert alone == [0, 1]
    assert torch.equal(shuffled, tagged(2, 3))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(users, coordinates\), got \(3,\)"):
        shuffle_coordinates(torch.zeros(3), [0, 0, 0])
    for groups in ([0, 0], [0.0, 0.0, 1.0], [[0], [0], [0]]):
        with pytest.raises(ValueError, match="one integer for each of 3 rows"):
            shuffle_coordinates(torch.zeros(3, 2), groups)
    with pytest.raises(ValueError, match=r"at most 8 bytes, got torch\.complex128"):
        shuffle_coordinates(torch.zeros(3, 2, dtype=torch.complex128), [0, 0, 0])
