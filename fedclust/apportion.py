"""Whole rows in proportion to weights."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from fedclust.checks import positive_int


def allocate_rows(
    total: int, weights: Sequence[float] | np.ndarray[Any, Any] | Tensor
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Split ``total`` rows in proportion to ``weights`` by the largest-remainder method.

    The shares are computed exactly. Each gets its whole part; the rows left go one each to the largest remainders,
    ties to the lower index. A weight of 0 gets 0 rows.

    Returns:
        int64 array of the length of ``weights``; its sum is exactly ``total``.

    Raises:
        ValueError: if total is negative, or the weights are empty, negative, not finite or all 0.
    """
    total = positive_int("total", total, least=0)
    values = np.asarray(weights.detach().cpu() if isinstance(weights, Tensor) else weights)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"weights must be a list with at least one entry, got shape {values.shape}")
    if not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(f"weights must be finite and at least 0, got {values.tolist()}")
    exact = [Fraction(value) for value in values.tolist()]
    whole = sum(exact)
    if whole == 0:
        raise ValueError(f"total weight is 0: all {len(exact)} weights are 0, so {total} rows cannot be allocated")
    shares = [total * value / whole for value in exact]
    rows = [int(share) for share in shares]
    by_remainder = sorted(range(len(rows)), key=lambda i: (rows[i] - shares[i], i))
    for i in by_remainder[: total - sum(rows)]:
        rows[i] += 1
    return np.asarray(rows, dtype=np.int64)
