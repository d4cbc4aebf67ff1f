"""Amplification by shuffling: the right values, the definition summed term by term, monotone, never above ε₀."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import pytest
from scipy.stats import binom

from fedclust.privacy.amplification import shuffle_amplification, shuffle_delta


@pytest.mark.parametrize(
    ("n", "epsilon"), [(2, 0.999983), (4, 0.999975), (20, 0.999349), (100, 0.553190), (1000, 0.154047)]
)
def test_right_values(n: int, epsilon: float) -> None:
    assert shuffle_amplification(1.0, n, 1e-5) == pytest.approx(epsilon, abs=6e-7)


def test_one_user_gains_nothing() -> None:
    for eps0 in (0.1, 1.0, 30.0):
        assert shuffle_amplification(eps0, 1, 0.3) == eps0
    assert shuffle_delta(0.5, 1.0, 1) > 0


def by_definition(epsilon: float, eps0: float, n: int) -> float:
    p_one = math.exp(eps0) / (1 + math.exp(eps0))
    law_p: dict[tuple[int, int], float] = {}
    law_q: dict[tuple[int, int], float] = {}
    for c in range(n):
        for a in range(c + 1):
            weight = float(binom.pmf(c, n - 1, math.exp(-eps0)) * binom.pmf(a, c, 0.5))
            for one, share in ((1, p_one), (0, 1 - p_one)):
                for law, delta in ((law_p, one), (law_q, 1 - one)):
                    key = (a + delta, c - a + 1 - delta)
                    law[key] = law.get(key, 0.0) + weight * share
    return sum(max(0.0, mass - math.exp(epsilon) * law_q.get(key, 0.0)) for key, mass in law_p.items())


@pytest.mark.parametrize("eps0", [0.1, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 30])
def test_delta_is_the_definition(eps0: float, n: int) -> None:
    for share in (0.0, 0.1, 0.5, 0.9, 0.999, 1.0, 1.5):
        assert shuffle_delta(share * eps0, eps0, n) == pytest.approx(by_definition(share * eps0, eps0, n), abs=1e-12)


@pytest.mark.parametrize("eps0", [0.05, 1.0, 5.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
def test_epsilon_is_the_smallest_that_holds(eps0: float, delta: float) -> None:
    for n in (2, 10, 500):
        epsilon = shuffle_amplification(eps0, n, delta)
        assert shuffle_delta(epsilon, eps0, n) <= delta
        if epsilon > 0:
            assert shuffle_delta(epsilon * (1 - 1e-6), eps0, n) > delta * (1 - 1e-8)


def test_never_above_the_local_budget_and_falling_with_users() -> None:
    for eps0 in (1e-6, 0.1, 1.0, 4.0, 40.0, 600.0):
        for delta in (0.5, 1e-5, 1e-14, 1e-200):
            values = [shuffle_amplification(eps0, n, delta) for n in (1, 2, 3, 5, 20, 100, 700)]
            assert all(0 <= value <= eps0 for value in values)
            assert all(more <= fewer for fewer, more in pairwise(values))


def test_falling_with_delta_and_growing_with_epsilon() -> None:
    by_delta = [shuffle_amplification(1.0, 200, delta) for delta in (1e-9, 1e-7, 1e-5, 1e-3)]
    assert by_delta == sorted(by_delta, reverse=True)
    assert len(set(by_delta)) == 4
    by_eps0 = [shuffle_amplification(eps0, 200, 1e-5) for eps0 in (0.2, 0.5, 1.0, 2.0, 4.0)]
    assert by_eps0 == sorted(by_eps0)
    # Distinguishing well enough by chance alone: no ε is needed.
    assert shuffle_amplification(0.1, 50, 0.5) == 0.0


def test_below_the_closed_form_where_that_applies() -> None:
    # Feldman, McMillan and Talwar 2021, Theorem 3.1, for n >= 16 ln(2/δ) e^ε₀: 531 users at ε₀ = 1, δ = 1e-5.
    eps0, delta = 1.0, 1e-5
    least = math.ceil(16 * math.log(2 / delta) * math.exp(eps0))
    assert least == 531
    for n in (least, 1000, 10_000):
        root = 8 * math.sqrt(math.exp(eps0) * math.log(4 / delta) / n)
        closed = math.log1p((math.exp(eps0) - 1) / (math.exp(eps0) + 1) * (root + 8 * math.exp(eps0) / n))
        assert shuffle_amplification(eps0, n, delta) < closed


def test_fast_and_stable_for_many_users() -> None:
    start = time.perf_counter()
    values = [shuffle_amplification(1.0, n, 1.1e-5) for n in (1000, 10_000, 100_000)]
    assert time.perf_counter() - start < 5
    # About ∝ 1/√n.
    assert values[0] / values[1] == pytest.approx(math.sqrt(10), rel=0.15)
    assert values[1] / values[2] == pytest.approx(math.sqrt(10), rel=0.15)


@pytest.mark.parametrize(
    ("eps0", "n", "delta", "message"),
    [
        (0, 4, 1e-5, "eps0 must be above 0"),
        (float("nan"), 4, 1e-5, "eps0"),
        (1.0, 0, 1e-5, "n must be a whole number of at least 1"),
        (1.0, 2.5, 1e-5, "n must be"),
        (1.0, 4, 0.0, "delta must be above 0"),
        (1.0, 4, 1.0, "delta must be below 1, got 1.0: such a statement says nothing"),
        (1.0, 1, 5.8, "delta must be below 1"),
    ],
)
def test_what_makes_no_sense_is_refused(eps0: float, n: int, delta: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shuffle_amplification(eps0, n, delta)


def test_delta_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="epsilon must be finite and at least 0"):
        shuffle_delta(-0.1, 1.0, 4)
    with pytest.raises(ValueError, match="eps0 must be at most 500"):
        shuffle_delta(1.0, 501.0, 4)
