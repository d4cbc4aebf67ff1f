"""How much privacy a shuffle of n locally randomised reports adds, exactly for the clones' dominating pair."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.special import betainc
from scipy.stats import binom

from fedclust.checks import non_negative, positive, positive_int

_DROPPED = 1e-9
# Beyond it clones are so rare that no amplification is left to compute.
_LARGEST_EPSILON = 500.0


def shuffle_amplification(eps0: float, n: int, delta: float) -> float:
    """Smallest ε such that n shuffled reports of an ε₀-DP randomiser are (ε, δ)-DP for each user (Theorem 1).

    The paper's Theorem 1 has no constants, and its source's closed form needs hundreds of users (531 at ε₀ = 1,
    δ = 1e-5). This is the number behind the closed form, for any n: the exact ε of the dominating pair of
    V. Feldman, A. McMillan, K. Talwar, Hiding among the clones, 2021, Section 3; see :func:`shuffle_delta`. It is an
    upper bound for every ε₀-DP randomiser, rounded up by bisection. It assumes that the other n − 1 users randomise as
    told and do not reveal their reports, and that the observer sees the shuffled reports only.

    Args:
        eps0: ε₀ of the local randomiser.
        n: Users in the shuffle. With one user nothing is claimed: the result is ε₀.
        delta: δ, above 0 and below 1.

    Returns:
        ε, at most ε₀; it falls with n.

    Raises:
        ValueError: for values out of range.
    """
    eps0, n, delta = positive("eps0", eps0), positive_int("n", n), positive("delta", delta)
    if delta >= 1:
        raise ValueError(f"delta must be below 1, got {delta!r}: such a statement says nothing")
    return eps0 if n == 1 or eps0 > _LARGEST_EPSILON else _amplified(eps0, n, delta)


def shuffle_delta(epsilon: float, eps0: float, n: int) -> float:
    """Smallest δ at which the dominating pair of n shuffled ε₀-DP reports is (ε, δ)-DP.

    With C ~ Bin(n − 1, e^−ε₀) clones, A ~ Bin(C, ½) and Δ ~ Bernoulli(e^ε₀ / (1 + e^ε₀)), P is the law of
    (A + Δ, C − A + 1 − Δ), Q the same with 1 − Δ for Δ, and δ(ε) = Σ max(0, P − e^ε Q).

    Raises:
        ValueError: for values out of range.
    """
    epsilon, eps0, n = non_negative("epsilon", epsilon), positive("eps0", eps0), positive_int("n", n)
    if eps0 > _LARGEST_EPSILON:
        raise ValueError(f"eps0 must be at most {_LARGEST_EPSILON:g}, got {eps0!r}")
    clones = np.arange(n)
    return _delta(epsilon, eps0, clones, binom.pmf(clones, n - 1, math.exp(-eps0)))


@lru_cache(maxsize=4096)
def _amplified(eps0: float, n: int, delta: float) -> float:
    clones = np.arange(n)
    weights = binom.pmf(clones, n - 1, math.exp(-eps0))
    kept = weights > delta * _DROPPED / n
    # What is left out may all be lost: its mass is taken off the budget.
    budget = delta - float(weights[~kept].sum())
    clones, weights = clones[kept], weights[kept]
    low, high = 0.0, eps0
    if _delta(low, eps0, clones, weights) <= budget:
        return low
    while high - low > 1e-12 * eps0:
        middle = (low + high) / 2
        if _delta(middle, eps0, clones, weights) <= budget:
            high = middle
        else:
            low = middle
    return high


def _delta(epsilon: float, eps0: float, clones: np.ndarray, weights: np.ndarray) -> float:
    """Σ over the numbers c of clones.

    With m = c + 1, a of m reports on the first side and p = P(Δ = 1): P(a) = 2·Bin(a; m, ½)·(p·a + (1 − p)(m − a)) / m,
    so P − e^ε Q = 2p·Bin(a; m, ½)·(s·a − t·(m − a)) / m with s = 1 − e^(ε − ε₀) and t = e^ε − e^−ε₀. That is positive
    above one threshold, and the sum from there on is p·(s·P[Bin(c, ½) ≥ threshold − 1] − t·P[Bin(c, ½) ≥ threshold]).
    """
    if epsilon >= eps0:
        return 0.0
    s, t = -math.expm1(epsilon - eps0), math.exp(epsilon) - math.exp(-eps0)
    threshold = np.floor(t / (s + t) * (clones + 1)) + 1
    terms = s * _at_least(threshold - 1, clones) - t * _at_least(threshold, clones)
    return float(np.dot(weights, np.maximum(terms, 0.0))) / (1 + math.exp(-eps0))


def _at_least(least: np.ndarray, n: np.ndarray) -> np.ndarray:
    """P[Bin(n, ½) ≥ least]."""
    inside = (least >= 1) & (least <= n)
    k = np.where(inside, least, 1.0)
    tail = betainc(k, np.where(inside, n - k + 1, 1.0), 0.5)
    return np.where(inside, tail, (least < 1).astype(np.float64))
