from __future__ import annotations

import numpy as np
import pytest
import torch

from fedclust.apportion import allocate_rows
from fedclust.random import numpy_generator


@pytest.mark.parametrize(
    ("total", "weights", "rows"),
    [
        (10, [1, 1, 1], [4, 3, 3]),
        (5000, [1, 1, 1], [1667, 1667, 1666]),
        (10, [0, 5, 0], [0, 10, 0]),
        (7, [2, 3, 1], [2, 4, 1]),  # shares 2.33 3.5 1.17
        (2, [1, 1, 1, 1], [1, 1, 0, 0]),
        (0, [3, 4], [0, 0]),
        (3, [0.5, 0.25, 0.25], [1, 1, 1]),  # shares 1.5 .75 .75: the larger remainders first
        (3, [1e-300, 1.0], [0, 3]),
        (10, [1e300, 1e300], [5, 5]),
    ],
)
def test_largest_remainder_by_hand(total: int, weights: list[float], rows: list[int]) -> None:
    result = allocate_rows(total, weights)
    assert result.tolist() == rows
    assert result.dtype == np.int64


@pytest.mark.parametrize("seed", range(20))
def test_allocation_sums_exactly_and_stays_within_one_row_of_the_share(seed: int) -> None:
    rng = numpy_generator(seed, "weights")
    weights = rng.integers(0, 500, size=int(rng.integers(1, 60))) * (rng.random() + 0.1)
    weights[0] += 1
    rows = allocate_rows(5000, torch.from_numpy(weights))
    shares = 5000 * weights / weights.sum()
    assert rows.sum() == 5000
    assert (np.abs(rows - shares) < 1).all()
    assert (rows[weights == 0] == 0).all()


@pytest.mark.parametrize(
    ("total", "weights", "words"),
    [
        (5, [0, 0], "total weight is 0"),
        (5, [], "at least one"),
        (5, [[1, 2]], "at least one"),
        (5, [1, -1], "at least 0"),
        (5, [1, float("nan")], "finite"),
        (5, [1, float("inf")], "finite"),
        (-1, [1], "total"),
        (2.5, [1], "total"),
    ],
)
def test_allocation_refuses_bad_input(total: int, weights: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        allocate_rows(total, weights)


def test_float_weights_by_hand() -> None:
    assert allocate_rows(10, np.array([1, 1, 1])).tolist() == [4, 3, 3]
    assert allocate_rows(3, np.array([0.1, 0.2, 0.7])).tolist() == [0, 1, 2]
    assert allocate_rows(0, np.array([1, 2])).tolist() == [0, 0]
    assert allocate_rows(30, np.array([0.1, 0.2, 0.7])).tolist() == [3, 6, 21]


def test_largest_remainder_is_exact() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        weights = rng.random(rng.integers(1, 30)) * (rng.random() < 0.9) + 1e-9
        total = int(rng.integers(0, 5000))
        counts = allocate_rows(total, weights)
        assert counts.sum() == total
        assert np.abs(counts - total * weights / weights.sum()).max() < 1 + 1e-6
