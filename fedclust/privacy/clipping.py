"""Clipping of a vector in the L2 norm, and the bound that the users' norms suggest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.checks import non_negative, positive

SMALLEST_BOUND = 2.0**-100


def l2_norm(vector: Tensor, who: str = "") -> float:
    """Euclidean norm of all elements, taken in float64.

    It is the very number that :func:`clip_norm` compares with its bound: a user whose norm is the bound is not clipped.

    Raises:
        ValueError: naming ``who``, if an element is NaN or infinite.
    """
    _check(vector, who)
    return _norm(vector.detach().to(torch.float64))


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
    _check(vector, who)
    wide = vector.detach().to(torch.float64)
    norm = _norm(wide)
    if norm <= bound:
        return vector.detach().clone()
    shrink = 1.0
    while True:
        clipped = _narrow(wide * (bound / norm * shrink), vector.dtype)
        if _norm(clipped.to(torch.float64)) <= bound:
            return clipped
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


def _check(vector: Any, who: str) -> None:
    name = f"{who}: " if who else ""
    if not isinstance(vector, Tensor) or not vector.is_floating_point():
        raise ValueError(f"{name}need a tensor of floats, got {getattr(vector, 'dtype', type(vector).__name__)}")
    bad = int((~torch.isfinite(vector)).sum())
    if bad:
        raise ValueError(f"{name}{bad} of {vector.numel()} elements are NaN or infinite")


def _norm(wide: Tensor) -> float:
    if wide.numel() == 0:
        return 0.0
    largest = float(wide.abs().max())
    # Scaled, so that squares neither overflow nor vanish.
    return largest * float(torch.linalg.vector_norm(wide / largest)) if largest > 0 else 0.0


def _narrow(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """``wide`` in ``dtype``, rounded towards zero, so that no element grows."""
    narrow = wide.to(dtype)
    grown = narrow.to(torch.float64).abs() > wide.abs()
    return torch.where(grown, torch.nextafter(narrow, torch.zeros_like(narrow)), narrow)
