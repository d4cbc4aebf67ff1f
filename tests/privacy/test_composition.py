"""Composition: Theorem 2's numbers, the pure bound, zCDP and both of its conversions."""

from __future__ import annotations

import math

import pytest
from scipy.special import erfc

from fedclust.privacy.composition import (
    compose_coordinates,
    compose_mixed,
    pure_epsilon,
    zcdp_epsilon,
    zcdp_rho,
)


def test_theorem_2_by_hand() -> None:
    bound = compose_coordinates(0.01, 1e-7, 100, 1e-6)
    by_hand = math.sqrt(2 * 100 * math.log(1e6)) * 0.01 + 100 * 0.01 * math.tanh(0.005)
    assert bound.epsilon == pytest.approx(by_hand, rel=1e-12)
    assert bound.epsilon == pytest.approx(0.5307, abs=5e-5)
    assert bound.delta == pytest.approx(1.1e-5, rel=1e-12)
    assert not bound.vacuous
    # The paper's simpler form is above.
    assert bound.epsilon <= math.sqrt(2 * 100 * math.log(1e6)) * 0.01 + 100 / 2 * 0.01**2


def test_ten_rounds_cost_more_and_none_costs_nothing() -> None:
    once, ten = compose_coordinates(0.01, 1e-7, 100, 1e-6), compose_coordinates(0.01, 1e-7, 100, 1e-6, rounds=10)
    assert ten.epsilon == pytest.approx(
        math.sqrt(2 * 1000 * math.log(1e6)) * 0.01 + 1000 * 0.01 * math.tanh(0.005), rel=1e-12
    )
    assert ten.epsilon > once.epsilon
    assert ten.delta == pytest.approx(1.01e-4, rel=1e-12)
    assert "Theorem 2) over 1,000 coordinates in 10 rounds" in ten.composition
    assert "over 100 coordinates in 1 round]" in str(once)
    assert "management server" not in once.against
    for none in (compose_coordinates(0.01, 1e-7, 100, 1e-6, rounds=0), compose_coordinates(0.01, 1e-7, 0, 1e-6)):
        assert (none.epsilon, none.delta) == (0, 0)


def test_parts_that_differ_add_up() -> None:
    mixed = compose_mixed([(0.01, 1e-7, 60), (0.01, 1e-7, 40)], 1e-6, 1)
    assert mixed.epsilon == pytest.approx(compose_coordinates(0.01, 1e-7, 100, 1e-6).epsilon, rel=1e-12)
    two = compose_mixed([(0.3, 0.0, 1), (0.4, 1e-8, 1)], 1e-6, 1)
    assert two.epsilon == pytest.approx(
        0.5 * math.sqrt(2 * math.log(1e6)) + 0.3 * math.tanh(0.15) + 0.4 * math.tanh(0.2), rel=1e-12
    )
    assert two.delta == pytest.approx(1.01e-6, rel=1e-9)


def test_delta_of_one_says_nothing() -> None:
    bound = compose_coordinates(0.1, 1e-5, 100_000, 1e-6)
    assert bound.delta >= 1
    assert bound.vacuous
    assert "refused, δ = 1 is not below 1" in str(bound)
    assert "ε" not in str(bound).split("[")[0]


def test_pure_bound_and_rho() -> None:
    assert pure_epsilon(100, 0.5) == 5.0
    assert round(pure_epsilon(580_571, 1.0)) == 762
    assert (pure_epsilon(0, 1.0), zcdp_rho(0, 1.0)) == (0, 0)
    # The whole vector costs ε₀²/2, however long.
    assert zcdp_rho(1, 1.0) == zcdp_rho(580_571, 1.0) == 0.5
    assert zcdp_rho(3, 0.5) == 0.125


def test_closed_conversion_by_hand() -> None:
    assert zcdp_epsilon(0.5, 1e-5) == pytest.approx(5.30, abs=0.005)
    assert zcdp_epsilon(50.0, 1e-5) == pytest.approx(98.0, abs=0.05)
    assert zcdp_epsilon(2.0, math.exp(-8)) == pytest.approx(10.0, rel=1e-12)
    assert zcdp_epsilon(0.0, 1e-5) == zcdp_epsilon(0.0, 1e-5, tight=True) == 0.0


def test_tight_conversion_is_the_best_order() -> None:
    for rho, delta in ((0.5, 1e-5), (50.0, 1e-5), (1e-4, 1e-9), (1e5, 1e-2)):
        tight, closed = zcdp_epsilon(rho, delta, tight=True), zcdp_epsilon(rho, delta)
        assert tight < closed
        orders = [1 + math.exp(i / 200) for i in range(-2400, 2400)]
        values = [rho * a + (math.log(1 / delta) - math.log(a)) / (a - 1) + math.log(1 - 1 / a) for a in orders]
        assert tight == pytest.approx(max(0.0, min(values)), rel=1e-4)
        assert tight <= min(values) + 1e-9 * closed
    assert zcdp_epsilon(0.5, 1e-5, tight=True) == pytest.approx(4.7284, abs=1e-4)


@pytest.mark.parametrize("rho", [0.02, 0.5, 5.0, 50.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
def test_no_conversion_promises_more_than_the_gaussian_keeps(rho: float, delta: float) -> None:
    # Gaussian noise with ρ = μ²/2 is exactly ρ-zCDP and its δ(ε) is known: a valid ε has δ(ε) <= δ.
    mu = math.sqrt(2 * rho)

    def phi(x: float) -> float:
        return float(0.5 * erfc(-x / math.sqrt(2)))

    for tight in (False, True):
        epsilon = zcdp_epsilon(rho, delta, tight=tight)
        exact = phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)
        assert exact <= delta


@pytest.mark.parametrize("delta", [0, 1, 1.5, -0.1, float("nan")])
def test_statements_without_meaning_are_refused(delta: float) -> None:
    for call in (
        lambda: compose_coordinates(0.1, 0.0, 10, delta),
        lambda: zcdp_epsilon(0.5, delta),
        lambda: zcdp_epsilon(0.0, delta),
    ):
        with pytest.raises(ValueError, match=r"delta.* must be"):
            call()


def test_bad_numbers_are_refused() -> None:
    for arguments in ((-0.1, 0, 1, 0.1), (0.1, -1, 1, 0.1), (0.1, 0, 1.5, 0.1), (0.1, 0, 1, 0.1, -1)):
        with pytest.raises(ValueError, match="must be"):
            compose_coordinates(*arguments)
    for call in (lambda: pure_epsilon(-1, 1.0), lambda: zcdp_rho(1, 0.0), lambda: zcdp_epsilon(-1.0, 0.1)):
        with pytest.raises(ValueError, match="must be"):
            call()
