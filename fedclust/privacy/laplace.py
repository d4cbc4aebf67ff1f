"""Laplace noise, drawn exactly on a grid: the coordinate-level local randomiser of Section 5.5.

Adding floating-point noise to floating-point values leaks through the lowest bits, whatever the noise looks like
(I. Mironov, On significance of the least significant bits for differential privacy, 2012). Here values are rounded to
a grid first, the noise is an integer number of grid steps with exactly the discrete Laplace law, the sum is an integer,
and only that sum becomes a float. Covered: the lowest bits, gaps in the noise, its tails, rounding of the clip.
Not covered: the time that drawing takes, copies of the vector left in memory, a broken generator of the system.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedclust.checks import positive, positive_int
from fedclust.privacy.clipping import clip_norm
from fedclust.privacy.randomness import RandomSource, SecureRandom, uniform_below

GRID_STEPS = 1 << 32
LARGEST_EPSILON = 2.0**30
_CHUNK = 1 << 16
# More than float64 rounding can add to a norm or a quotient, and nothing beside the noise.
_MARGIN = 1 - 2.0**-40


def coordinate_scale(bound: float, epsilon: float) -> float:
    """Scale b = 2Φ/ε₀ of the noise on each coordinate (coordinate-level, not whole-vector).

    A coordinate of a vector clipped to norm Φ lies in [−Φ, Φ] and changes by at most 2Φ, so noise of this scale makes
    each single coordinate ε₀-DP. What it makes of the whole vector is the ledger's matter.

    Args:
        bound: Φ, the clipping bound in the L2 norm.
        epsilon: ε₀, the budget of one coordinate, at most 2³⁰.

    Raises:
        ValueError: for values that are not finite and above 0, or whose quotient is too small or large for float64.
    """
    bound, epsilon = positive("the clipping bound", bound), positive("epsilon", epsilon)
    if epsilon > LARGEST_EPSILON:
        raise ValueError(f"epsilon must be at most 2**30, got {epsilon!r}")
    return _usable_scale(2 * bound / epsilon)


def laplace_noise(shape: int | Sequence[int], scale: float, source: RandomSource | None = None) -> Tensor:
    """Independent Laplace noise of mean 0, mean absolute value ``scale`` and variance 2·``scale``².

    To randomise a vector use :func:`randomise`, which also takes care of the lowest bits of the sum.

    Args:
        shape: Of the result.
        scale: b, finite and above 0.
        source: Of the random bits; the operating system's secure generator by default.

    Returns:
        float64 on the CPU, multiples of ``scale`` / 2³².

    Raises:
        ValueError: for a bad scale or a negative size.
    """
    scale = _usable_scale(positive("scale", scale))
    sizes = [positive_int("shape", size, least=0) for size in ([shape] if isinstance(shape, int) else shape)]
    steps = discrete_laplace(int(np.prod(sizes, dtype=np.int64)), GRID_STEPS, source)
    return torch.from_numpy(steps * (scale / GRID_STEPS)).reshape(sizes)


def randomise(
    vector: Tensor, bound: float, epsilon: float, source: RandomSource | None = None, who: str = ""
) -> Tensor:
    """``vector``, clipped to norm ``bound``, plus Laplace noise of scale 2Φ/ε₀ on every coordinate.

    The clipped values are rounded towards zero to multiples of b / 2³², which enlarges neither a coordinate nor the
    norm, so every bound of the ledger holds for the result as it is.

    Args:
        vector: (d₂,) the less important coordinates of a user.
        bound: Φ.
        epsilon: ε₀ of one coordinate.
        source: Of the random bits; the operating system's secure generator by default.
        who: Start of the error messages, such as ``"client 3"``.

    Returns:
        A new tensor of the vector's shape, type and device.

    Raises:
        ValueError: as :func:`coordinate_scale` and :func:`fedclust.privacy.clipping.clip_norm`.
    """
    step = coordinate_scale(bound, epsilon) / GRID_STEPS
    clipped = clip_norm(vector, bound, who).cpu().to(torch.float64).numpy()
    units = np.trunc(clipped / step * _MARGIN).astype(np.int64)
    units += discrete_laplace(units.size, GRID_STEPS, source).reshape(units.shape)
    return torch.from_numpy(units * step).to(device=vector.device, dtype=vector.dtype)


def discrete_laplace(count: int, steps: int, source: RandomSource | None = None) -> np.ndarray:
    """``count`` integers x with probability proportional to exp(−|x| / steps), exactly.

    Only uniform integers are compared, no logarithm is rounded. Method: C. Canonne, G. Kamath, T. Steinke, The discrete
    Gaussian for differential privacy, 2020, Algorithms 1 and 2.

    Args:
        count: How many.
        steps: A power of two up to 2³².
        source: Of the random bits; the operating system's secure generator by default.

    Returns:
        (count,) int64.

    Raises:
        ValueError: for a negative count or other steps.
    """
    count = positive_int("count", count, least=0)
    if steps.bit_count() != 1 or steps > GRID_STEPS:
        raise ValueError(f"steps must be a power of two up to 2**32, got {steps}")
    source = source or SecureRandom()
    result = np.empty(count, dtype=np.int64)
    for start in range(0, count, _CHUNK):
        part = result[start : start + _CHUNK]
        part[:] = _signed(len(part), steps, source)
    return result


def _usable_scale(scale: float) -> float:
    if not 2.0**-900 <= scale <= 2.0**900:
        raise ValueError(f"the scale of the noise must lie between 2**-900 and 2**900, got {scale!r}")
    return scale


def _signed(count: int, steps: int, source: RandomSource) -> np.ndarray:
    result = np.empty(count, dtype=np.int64)
    pending = np.arange(count)
    while pending.size:
        size = _fraction(pending.size, steps, source) + steps * _whole(pending.size, source)
        negative = (source.words(pending.size) & np.uint32(1)).astype(bool)
        # Zero has no sign: kept with both, it would be twice as likely as it should be.
        kept = ~(negative & (size == 0))
        result[pending[kept]] = np.where(negative, -size, size)[kept]
        pending = pending[~kept]
    return result


def _fraction(count: int, steps: int, source: RandomSource) -> np.ndarray:
    """Integers u below ``steps`` with probability proportional to exp(−u / steps)."""
    result = np.empty(count, dtype=np.int64)
    pending = np.arange(count)
    while pending.size:
        drawn = source.words(pending.size) & np.uint32(steps - 1)
        kept = _flips(pending.size, source, drawn, steps)
        result[pending[kept]] = drawn[kept]
        pending = pending[~kept]
    return result


def _whole(count: int, source: RandomSource) -> np.ndarray:
    """Integers v of at least 0 with probability proportional to exp(−v)."""
    result = np.zeros(count, dtype=np.int64)
    pending = np.arange(count)
    while pending.size:
        pending = pending[_flips(pending.size, source)]
        result[pending] += 1
    return result


def _flips(count: int, source: RandomSource, numerators: np.ndarray | None = None, steps: int = 1) -> np.ndarray:
    """Coins that are true with probability exp(−γ), γ = ``numerators`` / ``steps``, or γ = 1 without numerators.

    Let k be the first of 1, 2, … at which a coin of probability γ/k fails: P(k > j) = γʲ/j!, hence P(k odd) = exp(−γ).
    """
    result = np.empty(count, dtype=bool)
    pending = np.arange(count)
    k = 1
    while pending.size:
        going = np.ones(pending.size, dtype=bool)
        if numerators is not None:
            going = (source.words(pending.size) & np.uint32(steps - 1)) < numerators[pending]
        if k > 1:
            going[going] = uniform_below(k, int(going.sum()), source) == 0
        result[pending[~going]] = k % 2 == 1
        pending = pending[going]
        k += 1
    return result
