"""Secrets split into n shares of which any t give the secret back and t − 1 say nothing (A. Shamir, 1979)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from fedclust.checks import positive_int

PRIME = 2**256 + 297
"""The smallest prime above 2²⁵⁶: every secret of 32 bytes is an element of its field."""
SECRET_BYTES = 32
SHARE_BYTES = 33
_STEPS_AT_ONCE = 16


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shares of a secret: values at 1, …, ``count`` of a random polynomial whose value at 0 is the secret.

    Args:
        secret: 32 bytes.
        threshold: t, how many shares give the secret back.
        count: n, how many shares to make.

    Returns:
        n shares of 33 bytes; share i belongs to the point i + 1.

    Raises:
        ValueError: for a secret of another length, or unless 1 <= threshold <= count.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    threshold, count = positive_int("threshold", threshold), positive_int("count", count)
    if threshold > count:
        raise ValueError(f"threshold must be at most {count}, the number of shares, got {threshold}")
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients.append(int.from_bytes(secret, "big"))
    return [evaluate(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in range(1, count + 1)]


def evaluate(coefficients: Sequence[int], point: int) -> int:
    """Value of a polynomial modulo :data:`PRIME`; the coefficient of the highest power comes first."""
    value = 0
    # Points are small: a remainder for each coefficient would cost more than the digits that it saves.
    for start in range(0, len(coefficients), _STEPS_AT_ONCE):
        for coefficient in coefficients[start : start + _STEPS_AT_ONCE]:
            value = value * point + coefficient
        value %= PRIME
    return value


def recover_secret(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret from at least ``threshold`` shares.

    Args:
        shares: Point (1, 2, …) to share. Those beyond ``threshold`` are not looked at.
        threshold: t of :func:`split_secret`.

    Raises:
        ValueError: for too few shares, or shares that do not belong to one secret of 32 bytes. Wrong shares can also
            give a wrong secret: check it against what is known of it.
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} of {threshold} needed shares")
    points = sorted(shares)[:threshold]
    for point in points:
        if len(shares[point]) != SHARE_BYTES or positive_int("point of a share", point) >= PRIME:
            raise ValueError(f"share {point} has {len(shares[point])} bytes instead of {SHARE_BYTES}")
    weights = weights_at_zero(tuple(points))
    secret = sum(weight * int.from_bytes(shares[point], "big") for weight, point in zip(weights, points)) % PRIME
    if secret >> (8 * SECRET_BYTES):
        raise ValueError(f"the shares at {points} do not belong to one secret")
    return secret.to_bytes(SECRET_BYTES, "big")


@lru_cache(maxsize=16)
def weights_at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights w with f(0) = Σ w_i·f(points_i) for polynomials of degree below the number of points."""
    weights = []
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
