"""Laplace noise, drawn exactly on a grid: the coordinate-level local randomiser of Section 5.5.

Adding floating-point noise to floating-point values leaks through the lowest bits, whatever the noise looks like
(I. Mironov, On significance of the least significant bits for differential privacy, 2012). Here values are rounded to
a grid first, the noise is an integer number of grid steps with exactly the discrete Laplace law, the sum is an integer,
and only that sum becomes a float. Covered: the lowest bits, gaps in the noise, its tails, rounding of the clip.
Not covered: the time that drawing takes, copies of the vector left in memory, a broken generator of the system.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedclust.checks import positive, positive_int
from fedclust.privacy.clipping import clip_norm
from fedclust.privacy.kernels import combine, draw_fractions, draw_wholes
from fedclust.privacy.randomness import RandomSource, SecureRandom, Supply

GRID_STEPS = 1 << 32
LARGEST_EPSILON = 2.0**30
# Values at a time, so that what is worked on stays in the second-level cache.
_AT_ONCE = 1 << 13
# Random bytes asked for per value; the mean is 11.1.
_BYTES = 12
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
    result = clip_norm(vector, bound, who).cpu().reshape(-1)
    steps = discrete_laplace(result.numel(), GRID_STEPS, source)
    for start in range(0, len(steps), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        scaled = result[part].to(torch.float64).numpy() / step
        scaled *= _MARGIN
        steps[part] += np.trunc(scaled, out=scaled).astype(np.int64)
        result[part] = torch.from_numpy(np.multiply(steps[part], step, out=scaled))
    return result.reshape(vector.shape).to(vector.device)


def discrete_laplace(count: int, steps: int, source: RandomSource | None = None) -> np.ndarray:
    """``count`` integers x with probability proportional to exp(−|x| / steps), exactly.

    Only uniform integers are compared, no logarithm is rounded. Method: C. Canonne, G. Kamath, T. Steinke, The discrete
    Gaussian for differential privacy, 2020, Algorithms 1 and 2; in :mod:`fedclust.privacy.kernels`. A value takes about
    eleven random bytes.

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
    bits = steps.bit_length() - 1
    supply = Supply(source or SecureRandom())
    result = np.empty(count, dtype=np.int64)
    room = np.empty((2, min(count, _AT_ONCE)), dtype=np.int64)
    done = 0
    while done < count:
        done = _add_some(result, done, bits, supply, room[:, : count - done])
    return result


def _add_some(result: np.ndarray, done: int, bits: int, supply: Supply, room: np.ndarray) -> int:
    """Draws as many values as there is room for; says how many of them are done when those that are −0 are left out."""
    fractions, wholes = room
    size, wanted = room.shape[1], _BYTES * (len(result) - done)
    found = 0
    while found < size:
        found, used = draw_fractions(fractions, found, supply.at_hand, bits)
        supply.advance(used, wanted if found < size else 0)
    found = successes = 0
    while found < size:
        found, successes, used = draw_wholes(wholes, found, successes, supply.at_hand)
        supply.advance(used, wanted if found < size else 0)
    taken = 0
    while taken < size:
        done, taken, used = combine(result, done, fractions, wholes, taken, supply.at_hand, bits)
        supply.advance(used, wanted if taken < size else 0)
    return done


def _usable_scale(scale: float) -> float:
    if not 2.0**-900 <= scale <= 2.0**900:
        raise ValueError(f"the scale of the noise must lie between 2**-900 and 2**900, got {scale!r}")
    return scale
