"""Clipping of a vector in the L2 norm, and the bound that the users' norms suggest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.checks import non_negative, positive

SMALLEST_BOUND = 2.0**-100
# Elements at a time: what is worked on stays in the second-level cache, and no float64 copy of a vector is made.
_AT_ONCE = 1 << 15
INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → the integers that hold its bits."""


def l2_norm(vector: Tensor, who: str = "") -> float:
    """Euclidean norm of all elements, taken in float64.

    It is the very number that :func:`clip_norm` compares with its bound: a user whose norm is the bound is not clipped.

    Raises:
        ValueError: naming ``who``, if an element is NaN or infinite.
    """
    return _norm(_flat(vector, who), who)


def clip_norm(vector: Tensor, bound: float, who: str = "") -> Tensor:
    """``vector`` · min(1, bound / ‖vector‖₂), as a new tensor (Section 5.5).

    A vector within the bound, the zero vector among them, comes back bit for bit. A longer one comes back with norm
    ``bound`` up to the rounding of its own type, and never above.

    Args:
        vector: Floats of any shape.
        bound: Φ, finite and above 0.
        who: Start of the error messages, such as ``"client 3"``.

    Raises:
        ValueError: for a bad bound or, naming ``who``, a vector with NaN or infinite values.
    """
    name = f"{who}: " if who else ""
    bound = positive(f"{name}the clipping bound", bound)
    flat = _flat(vector, who)
    norm = _norm(flat, who)
    if norm <= bound:
        return vector.detach().clone()
    result = torch.empty_like(flat)
    shrink = 1.0
    while True:
        factor = bound / norm * shrink
        for part, room in zip(torch.split(flat, _AT_ONCE), torch.split(result, _AT_ONCE), strict=True):
            room.copy_(_narrow(part.to(torch.float64) * factor, vector.dtype))
        if _norm(result, who) <= bound:
            return result.reshape(vector.shape)
        shrink -= 2.0**-52


def median_norm(norms: Mapping[int, float] | Iterable[float]) -> float:
    """Φ: the median of the users' norms (Section 7.4), the mean of the middle two for an even number of users.

    Zero norms count. Should the median be 0 nevertheless, because most users did not move, it is the median of the
    positive norms; should nobody have moved, it is 2⁻¹⁰⁰: a bound that is as good as any for zero vectors, with noise
    too small to move a model. [ours]

    Args:
        norms: One per user, by id or in any order.

    Raises:
        ValueError: without any norm, or naming the user (or the position) of one that is NaN, infinite or negative.
    """
    named = norms.items() if isinstance(norms, Mapping) else enumerate(norms)
    values = np.array([non_negative(f"the norm of user {user}", value) for user, value in named], dtype=np.float64)
    if values.size == 0:
        raise ValueError("the median needs the norm of at least one user")
    median = float(np.median(values))
    if median == 0 and values.any():
        median = float(np.median(values[values > 0]))
    return median or SMALLEST_BOUND


def _flat(vector: Any, who: str) -> Tensor:
    if not isinstance(vector, Tensor) or not vector.is_floating_point():
        name = f"{who}: " if who else ""
        raise ValueError(f"{name}need a tensor of floats, got {getattr(vector, 'dtype', type(vector).__name__)}")
    return vector.detach().reshape(-1)


def _norm(flat: Tensor, who: str) -> float:
    squares = _squares(flat, 1.0)
    if 2.0**-800 < squares < math.inf:
        return math.sqrt(squares)
    bad = int((~torch.isfinite(flat)).sum())
    if bad:
        name = f"{who}: " if who else ""
        raise ValueError(f"{name}{bad} of {flat.numel()} elements are NaN or infinite")
    largest = float(flat.abs().max()) if flat.numel() else 0.0
    # Scaled, so that squares neither overflow nor vanish.
    return largest * math.sqrt(_squares(flat, largest)) if largest > 0 else 0.0


def _squares(flat: Tensor, scale: float) -> float:
    """Sum of the squares of the elements over ``scale``."""
    total = 0.0
    for part in torch.split(flat, _AT_ONCE):
        wide = part.to(torch.float64)
        wide = wide if scale == 1 else wide / scale
        total += float(wide @ wide)
    return total


def _narrow(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """``wide`` in ``dtype``, rounded towards zero, so that no element grows."""
    narrow = wide.to(dtype)
    bits = narrow.view(INTEGER_OF_SIZE[dtype.itemsize])
    # Read as a whole number, sign aside, the next float towards zero is one less.
    bits -= (narrow.to(torch.float64).abs() > wide.abs()).to(bits.dtype)
    return narrow
