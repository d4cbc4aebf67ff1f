"""Bounds on what many noisy coordinates and rounds reveal together, each labelled with how it was composed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.optimize import minimize_scalar

from fedclust.checks import non_negative, positive, positive_int, real_number

LOCAL = "everybody who sees the noisy vector, the management server included"
SHUFFLED = "the aggregation server only, and only if nobody else in the cluster reveals a report"


@dataclass(frozen=True)
class Bound:
    """One (ε, δ) bound.

    Attributes:
        name: ``theorem_2``, ``pure``, ``zcdp`` or ``zcdp_tight``.
        epsilon: ε.
        delta: δ; a bound with δ >= 1 says nothing, see :attr:`vacuous`.
        composition: How coordinates and rounds were put together, in words.
        against: Whom the bound holds against.
    """

    name: str
    epsilon: float
    delta: float
    composition: str
    against: str

    @property
    def vacuous(self) -> bool:
        """Whether δ >= 1: every mechanism satisfies that."""
        return self.delta >= 1

    def __str__(self) -> str:
        if self.vacuous:
            return f"{self.name}: refused, δ = {self.delta:.3g} is not below 1 [{self.composition}]"
        value = f"ε = {self.epsilon:.6g} at δ = {self.delta:.3g}"
        return f"{self.name}: {value} [{self.composition}] against {self.against}"


def compose_coordinates(eps: float, delta: float, d2: int, delta_prime: float, rounds: int = 1) -> Bound:
    """Theorem 2: ε_low = √(2·d₂·ln(1/δ'))·ε_s + d₂·ε_s·tanh(ε_s/2), δ_low = d₂·δ_s + δ', for ``rounds`` equal rounds.

    Rounds are composed like coordinates: d₂·rounds mechanisms. No round costs nothing.

    Args:
        eps: ε_s of one shuffled coordinate.
        delta: δ_s of one shuffled coordinate.
        d2: Coordinates.
        delta_prime: δ', above 0 and below 1.
        rounds: How often.

    Returns:
        The bound, which is :attr:`Bound.vacuous` where δ_low reaches 1.

    Raises:
        ValueError: for values out of range.
    """
    eps, delta = non_negative("eps", eps), non_negative("delta", delta)
    d2, rounds = positive_int("d2", d2, least=0), positive_int("rounds", rounds, least=0)
    return compose_mixed([(eps, delta, d2 * rounds)], probability("delta_prime", delta_prime), rounds)


def compose_mixed(parts: Sequence[tuple[float, float, int]], delta_prime: float, rounds: int) -> Bound:
    """Theorem 2 for mechanisms that differ: (ε_s, δ_s, number of them) each.

    It is the heterogeneous advanced composition that the paper's proof starts from (P. Kairouz, S. Oh, P. Viswanath,
    The composition theorem for differential privacy, 2015, Theorem 3.5).
    """
    count = sum(number for _, _, number in parts)
    label = f"advanced composition (Theorem 2) over {count:,} coordinates in {rounds_text(rounds)}"
    if count == 0:
        return Bound("theorem_2", 0.0, 0.0, label, SHUFFLED)
    squares = math.fsum(number * eps * eps for eps, _, number in parts)
    drift = math.fsum(number * eps * math.tanh(eps / 2) for eps, _, number in parts)
    epsilon = math.sqrt(2 * squares * math.log(1 / delta_prime)) + drift
    delta = math.fsum(number * delta for _, delta, number in parts) + delta_prime
    return Bound("theorem_2", epsilon, delta, label, SHUFFLED)


def pure_epsilon(d2: int, eps0: float) -> float:
    """ε of one round without any δ: √d₂ · ε₀.

    The clip bounds the L2 norm by Φ, so two clipped vectors differ by at most 2Φ in L2, hence by at most √d₂·2Φ in L1,
    and Laplace noise of scale b = 2Φ/ε₀ on every coordinate gives Σ|Δ_j|/b ≤ √d₂·ε₀.

    Raises:
        ValueError: for values out of range.
    """
    return math.sqrt(positive_int("d2", d2, least=0)) * positive("eps0", eps0)


def zcdp_rho(d2: int, eps0: float) -> float:
    """ρ of one round: ε₀²/2 for the whole vector, however long (0 if it is empty).

    Coordinate j is |Δ_j|/b-DP, hence (Δ_j/b)²/2-zCDP (M. Bun, T. Steinke, Concentrated differential privacy, 2016,
    Proposition 1.4), coordinates add up, and the clip in L2 gives Σ(Δ_j/b)² ≤ (2Φ)²/b² = ε₀². Rounds add up as well.

    Raises:
        ValueError: for values out of range.
    """
    return positive("eps0", eps0) ** 2 / 2 if positive_int("d2", d2, least=0) else 0.0


def zcdp_epsilon(rho: float, delta: float, *, tight: bool = False) -> float:
    """ε at which ρ-zCDP implies (ε, δ)-DP.

    The closed form is ε = ρ + 2·√(ρ·ln(1/δ)) (Bun and Steinke, Proposition 1.3). The tighter one goes through Rényi
    divergences, which zCDP bounds by ρα at every order α > 1, with the conversion of B. Balle et al., Hypothesis
    testing interpretations and Rényi differential privacy, 2020, Theorem 21. Proof: with the privacy loss L,
    δ(ε) = E max(0, 1 − e^(ε − L)). For x ≥ 0, (1 − e^−x)·e^(−(α − 1)x) is largest at e^−x = 1 − 1/α, where it is
    (1/α)(1 − 1/α)^(α − 1). So δ(ε) ≤ (1/α)(1 − 1/α)^(α − 1)·E e^((α − 1)(L − ε)), and E e^((α − 1)L) ≤ e^((α − 1)ρα).
    Solved for ε: ρα + (ln(1/δ) − ln α)/(α − 1) + ln(1 − 1/α). That holds at every α, so also at the one that a
    numerical search takes for the best.

    Args:
        rho: ρ of all rounds together.
        delta: δ, above 0 and below 1.
        tight: Take the smaller of both.

    Raises:
        ValueError: for values out of range.
    """
    rho, delta = non_negative("rho", rho), probability("delta", delta)
    if rho == 0:
        return 0.0
    closed = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    if not tight:
        return closed

    def at(log_order: float) -> float:
        order_less_one = math.exp(log_order)
        order = 1 + order_less_one
        return rho * order + (-math.log(delta) - math.log(order)) / order_less_one - math.log1p(1 / order_less_one)

    # The order that the closed form takes is near the best one.
    near = 0.5 * math.log(math.log(1 / delta) / rho)
    found = minimize_scalar(at, bounds=(near - 5, near + 5), method="bounded", options={"xatol": 1e-9})
    return max(0.0, min(closed, float(found.fun)))


def rounds_text(rounds: int) -> str:
    """``1 round``, ``2 rounds``."""
    return f"{rounds:,} round{'' if rounds == 1 else 's'}"


def probability(name: str, value: float) -> float:
    """``value`` as a δ of a statement, above 0 and below 1.

    Raises:
        ValueError: for any other value: with δ >= 1 a statement says nothing.
    """
    number = real_number(name, value)
    if not 0 < number < 1:
        raise ValueError(f"{name} must be above 0 and below 1 (at 1 a statement says nothing), got {value!r}")
    return number
