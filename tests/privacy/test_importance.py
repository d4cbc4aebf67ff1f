"""Top k, ranking, and vectors taken apart and put together: every hand value, ties, and what is refused."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from fedclust.privacy.importance import count_of, global_ranking, join_important, split_important, top_k_indices


@pytest.mark.parametrize(
    ("ratio", "d", "count"),
    [
        (0.2, 36, 7),  # the paper's Figure 4
        (0.1, 30, 3),  # 3.0000000000000004
        (0.29, 100, 29),  # 28.999999999999996
        (1 / 3, 30, 10),
        (0.0025, 582_026, 1455),
        (0.0025, 10_000_000, 25_000),
        (0.001, 36, 1),  # at least one
        (1.0, 5, 5),
        (1, 1, 1),
        (0.999999, 1_000_000, 999_999),
    ],
)
def test_count(ratio: float, d: int, count: int) -> None:
    assert count_of(ratio, d) == count


@pytest.mark.parametrize(
    ("ratio", "d"), [(0, 9), (-0.1, 9), (1.01, 9), (float("nan"), 9), ("a", 9), (0.5, 0), (0.5, 2.5)]
)
def test_counts_that_make_no_sense_are_refused(ratio: float, d: int) -> None:
    with pytest.raises(ValueError, match=r"ratio|d must"):
        count_of(ratio, d)


def figure_4() -> Tensor:
    g = torch.full((36,), 0.5)
    g[torch.tensor([1, 3, 5, 10, 19, 21, 22])] = torch.tensor([9.0, 8.0, 7.0, -5.0, -8.0, 4.0, 3.0])
    return g


def test_figure_4_of_the_paper() -> None:
    assert top_k_indices(figure_4(), 7).tolist() == [1, 3, 19, 5, 10, 21, 22]
    assert top_k_indices(figure_4().numpy(), 7).tolist() == [1, 3, 19, 5, 10, 21, 22]
    assert top_k_indices(figure_4().tolist(), 2).tolist() == [1, 3]


def test_ties_go_to_the_lower_index() -> None:
    assert top_k_indices(torch.zeros(5), 3).tolist() == [0, 1, 2]
    assert top_k_indices(torch.tensor([0.0, -0.0, 0.0]), 2).tolist() == [0, 1]
    # Five equal magnitudes around the boundary.
    assert top_k_indices(torch.tensor([1.0, -2.0, 9.0, 2.0, 2.0, -2.0, 0.0, -2.0]), 4).tolist() == [2, 1, 3, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_top_k_is_a_stable_sort(dtype: torch.dtype) -> None:
    values = torch.randint(-20, 20, (500,), generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = sorted(range(500), key=lambda i: (-abs(float(values[i])), i))
    for k in (1, 2, 77, 499, 500):
        assert top_k_indices(values, k).tolist() == wanted[:k]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_top_k_is_the_same_on_a_gpu() -> None:
    values = torch.randint(-20, 20, (5000,), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(top_k_indices(values.cuda(), 700).cpu(), top_k_indices(values, 700))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_is_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match="client 7: 1 of 3 coordinates are NaN or infinite"):
        top_k_indices(torch.tensor([1.0, value, 2.0]), 1, "client 7")


def test_more_than_all_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"client 7: k = 4 important coordinates of a vector with 3"):
        top_k_indices(torch.ones(3), 4, "client 7")
    for k in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="client 7: k must be a whole number of at least 1"):
            top_k_indices(torch.ones(3), k, "client 7")  # type: ignore[arg-type]
    for wrong in (torch.ones(2, 2), torch.ones(3, dtype=torch.int64), [True, False]):
        with pytest.raises(ValueError, match="need a vector of floats"):
            top_k_indices(wrong, 1)


def ranked(sequences: list[list[int]], k: int) -> list[int]:
    """The definition, in exact fractions."""
    scores: dict[int, Fraction] = {}
    for sequence in sequences:
        for position, e in enumerate(sequence, start=1):
            scores[e] = scores.get(e, Fraction(0)) + Fraction(1, 1 + position)
    return sorted(scores, key=lambda e: (-scores[e], e))[:k]


def test_ranking_by_hand() -> None:
    # p(4) = 1/2 + 1/4 + 1/2, p(7) = 1/3 + 1/2, p(2) = 1/4 + 1/3, p(9) = 1/3 + 1/4 (a tie with 2).
    sequences = [[4, 7, 2], [7, 2, 4], [4, 9, 11], [9, 5, 4]]
    assert ranked(sequences, 3) == [4, 7, 9]
    assert global_ranking(sequences, 3).tolist() == [4, 7, 9]
    assert global_ranking([[5, 3, 1]], 3).tolist() == [5, 3, 1]
    assert global_ranking([[5, 3], [3, 5]], 2).tolist() == [3, 5]
    # 1/2 = 1/3 + 1/6: a tie between different positions.
    assert ranked([[8, 3, 10, 11, 12], [13, 14, 15, 16, 3]], 2) == [3, 8]
    assert global_ranking([[8, 3, 10, 11, 12], [13, 14, 15, 16, 3]], 2).tolist() == [3, 8]


def test_ranking_equals_the_definition_in_any_order_of_the_users() -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.choice(60, 25, replace=False).tolist() for _ in range(21)]
    wanted = ranked(sequences, 40)
    for _ in range(5):
        assert global_ranking(sequences, 40).tolist() == wanted
        rng.shuffle(sequences)


def test_ranking_of_any_integer_type() -> None:
    sequences = [np.array([2, 1], dtype=np.uint8), torch.tensor([1, 0], dtype=torch.int32)]
    result = global_ranking(sequences, 3)
    assert result.tolist() == [1, 2, 0]
    assert result.dtype == torch.int64


def test_ranking_of_huge_indices_takes_no_table_of_their_size() -> None:
    assert global_ranking([[2**60, 5], [2**60, 7]], 3).tolist() == [2**60, 5, 7]


def test_ranking_at_the_size_of_the_largest_experiment() -> None:
    rng = np.random.default_rng(0)
    # Strides instead of draws without replacement, which would take longer than what is measured.
    sequences = [(start + 397 * np.arange(25_000)) % 10_000_000 for start in rng.integers(10_000_000, size=500)]
    start = time.perf_counter()
    result = global_ranking(sequences, 25_000)
    assert time.perf_counter() - start < 15
    assert len(np.unique(result.numpy())) == 25_000


@pytest.mark.parametrize(
    ("sequences", "k", "message"),
    [
        ([], 1, "at least one sequence"),
        ([[1, 2], []], 1, "sequence 1 must be a non-empty list"),
        ([[1, 2], [1, 2, 3]], 1, "sequence 1 has 3 elements, sequence 0 has 2"),
        ([[1, 2], [3, 3]], 1, "sequence 1 holds an element more than once"),
        ([[1, 2**60], [2**60, 2**60]], 1, "sequence 1 holds an element more than once"),
        ([[1, 2], [3, -1]], 1, "sequence 1 holds -1"),
        ([[1.0, 2.0]], 1, "sequence 0 must be a non-empty list of integers"),
        ([[1, 2], [1, 2]], 3, "k = 3 elements of sequences that hold 2"),
        ([[1, 2]], 0, "k must be"),
    ],
)
def test_sequences_that_break_the_protocol_are_refused(sequences: list, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        global_ranking(sequences, k)


def test_the_parts_cover_the_vector_exactly_once() -> None:
    vector = torch.arange(10.0) * 10
    important, less = split_important(vector, [7, 0, 3])
    assert important.tolist() == [70, 0, 30]
    assert less.tolist() == [10, 20, 40, 50, 60, 80, 90]
    assert torch.equal(join_important(important, less, [7, 0, 3], 10), vector)


@pytest.mark.parametrize("count", [0, 1, 9, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_joining_inverts_splitting(count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(count)
    vector = torch.randn(10, generator=generator).to(dtype)
    indices = torch.randperm(10, generator=generator)[:count]
    important, less = split_important(vector, indices)
    assert len(important) + len(less) == 10
    assert torch.equal(join_important(important, less, indices, 10), vector)


def test_the_parts_are_copies() -> None:
    vector = torch.arange(4.0)
    important, less = split_important(vector, [2])
    important.zero_()
    less.zero_()
    assert vector.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([1, 1, 2], "1 of 3 indices repeat others"),
        ([1, 10], "index 10 lies outside 0 to 9"),
        ([-1], "index -1 lies outside 0 to 9"),
        ([0.5], "list of integers"),
        ([True, False], "list of integers"),
        ([[1]], "list of integers"),
    ],
)
def test_indices_that_do_not_fit_are_refused(indices: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_important(torch.zeros(10), indices)
    with pytest.raises(ValueError, match=message):
        join_important(torch.zeros(len(indices)), torch.zeros(10 - len(indices)), indices, 10)


def test_parts_that_do_not_fit_are_refused() -> None:
    for important, less in (
        (torch.zeros(2), torch.zeros(7)),
        (torch.zeros(3), torch.zeros(6)),
        (torch.zeros(3, 1), torch.zeros(7)),
    ):
        with pytest.raises(ValueError, match="into 3 and 7 coordinates, got shapes"):
            join_important(important, less, [7, 0, 3], 10)
    with pytest.raises(ValueError, match="differ in kind"):
        join_important(torch.zeros(3), torch.zeros(7).double(), [7, 0, 3], 10)
    with pytest.raises(ValueError, match="need a vector"):
        split_important(torch.zeros(5, 2), [0])
