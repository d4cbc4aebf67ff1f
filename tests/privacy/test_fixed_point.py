"""Fixed-point numbers: steps by hand, sums at the edge of the ring, errors within half a step each."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from fedclust.privacy.fixed_point import FixedPoint


def test_steps_by_hand() -> None:
    # 2**53 / 4 clients = 2**51 steps for a bound of 1.
    assert FixedPoint.for_sum(4, 1.0) == FixedPoint(exponent=-51, largest=2**51, bits=64)
    # 3 clients: 2**53 // 3 lies between 2**51 and 2**52.
    assert FixedPoint.for_sum(3, 1.0).step == 2.0**-51
    # (2**31 − 1) // 4 lies just below 2**29.
    assert FixedPoint.for_sum(4, 1.0, 32) == FixedPoint(exponent=-28, largest=2**28, bits=32)
    # A bound of 5: 5·2**k at most 2**51.
    assert FixedPoint.for_sum(4, 5.0) == FixedPoint(exponent=-48, largest=5 * 2**48, bits=64)
    # .3·2**k: the bound is rounded up, so that it can be encoded.
    grid = FixedPoint.for_sum(1, 0.3, 32)
    assert (grid.step, grid.largest) == (2.0**-32, 1288490189)
    assert FixedPoint.for_sum(4, 2.0**60).step == 2.0**9


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("clients", [1, 2, 3, 7, 100, 1000])
@pytest.mark.parametrize("bound", [1e-200, 0.3, 1.0, 3.0, 1e6, 1e200])
def test_the_largest_sums_do_not_overflow_and_no_finer_step_would_do(bits: int, clients: int, bound: float) -> None:
    grid = FixedPoint.for_sum(clients, bound, bits)
    limit = min(2 ** (bits - 1) - 1, 2**53)
    assert clients * grid.largest <= limit < clients * (2 * grid.largest + 2)
    for value in (bound, -bound):
        coded = grid.encode(np.full(3, value))
        assert coded.dtype == grid.dtype
        total = np.zeros(3, dtype=grid.dtype)
        for _ in range(clients):
            total += coded
        decoded = grid.decode(total, clients)
        assert len(set(decoded.tolist())) == 1
        error = Fraction(float(decoded[0])) - clients * Fraction(value)
        assert abs(error) <= clients * Fraction(grid.step) / 2


def test_values_round_to_the_nearest_step() -> None:
    grid = FixedPoint(exponent=-2, largest=40, bits=32)
    coded = grid.encode(np.array([0.0, 0.25, -0.25, 0.3, -0.3, 0.374, 0.376, -10.0]))
    assert coded.dtype == np.uint32
    assert coded.view(np.int32).tolist() == [0, 1, -1, 1, -1, 1, 2, -40]


def test_what_no_sum_can_be_is_refused() -> None:
    grid = FixedPoint(exponent=0, largest=10, bits=64)
    edge = np.array([20, 2**64 - 20], dtype=np.uint64)
    assert grid.decode(edge, 2).tolist() == [20.0, -20.0]
    with pytest.raises(ValueError, match="1 of 2 elements of the sum exceed 2 times the bound"):
        grid.decode(np.array([21, 0], dtype=np.uint64), 2)
    with pytest.raises(ValueError, match="2 of 2 elements"):
        grid.decode(edge, 1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((0, 1.0), "clients must be .* at least 1, got 0"),
        ((2, 0.0), "bound must be above 0"),
        ((2, float("nan")), "bound must be a number"),
        ((2, float("inf")), "bound must be finite"),
        ((2, 1e300), "between 2"),
        ((2, 1e-300), "between 2"),
        ((2, 1.0, 16), "bits must be 32 or 64, got 16"),
        ((2**31, 1.0, 32), "too many for 32 bits"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        FixedPoint.for_sum(*arguments)
