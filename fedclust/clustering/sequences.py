"""Checks of sequences before they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclust.arrays import array_of
from fedclust.clustering.checks import prefix

Numbers = NDArray[Any]
_MOST = 2**62


def as_numbers(x: Any, name: str, who: str = "") -> Numbers:
    """`x` (array, tensor, list) as an array of int64 or, if it holds fractions, float64; never unsigned.

    Raises:
        ValueError: for booleans, complex numbers, text, NaN, infinity, or integers beyond ±2**62.
    """
    values = array_of(x)
    if values.dtype.kind == "f":
        bad = int(np.count_nonzero(~np.isfinite(values)))
        if bad:
            raise ValueError(f"{prefix(who)}{bad} of the {values.size} values of {name} are NaN or infinite")
        return np.ascontiguousarray(values, np.float64)
    if values.dtype.kind not in "iu":
        raise ValueError(f"{prefix(who)}{name} must hold integers or real numbers, got {values.dtype}")
    if values.size and not -_MOST <= int(values.min()) <= int(values.max()) <= _MOST:
        raise ValueError(f"{prefix(who)}{name} must hold integers within ±2**62, got {int(values.max())}")
    return np.ascontiguousarray(values, np.int64)


def as_sequence(x: Any, name: str, who: str = "") -> Numbers:
    """`x` as a sequence (k,) with k >= 1, int64 or float64.

    Raises:
        ValueError: as `as_numbers`, or for another shape or an empty sequence.
    """
    try:
        empty = len(x) == 0
    except TypeError:
        raise ValueError(f"{prefix(who)}{name} must be a sequence of numbers, got {type(x).__name__}") from None
    if empty:
        raise ValueError(f"{prefix(who)}{name} is empty; a sequence needs at least one element")
    values = as_numbers(x, name, who)
    if values.ndim != 1:
        raise ValueError(f"{prefix(who)}{name} must have shape (k,), got {values.shape}")
    return values


def as_matrix(sequences: Sequence[Any] | Numbers, ids: Sequence[Any] | None = None) -> Numbers:
    """The clients' sequences as one matrix (N, k).

    Args:
        sequences: one sequence per client, all of the same length k >= 1.
        ids: (N,) names for error messages; positions 0 to N − 1 if None.

    Raises:
        ValueError: naming the client, for anything that is no such sequence.
    """
    if len(sequences) == 0:
        raise ValueError("sequences must hold at least one client's, got none")
    names = list(range(len(sequences))) if ids is None else list(ids)
    if len(names) != len(sequences):
        raise ValueError(f"ids must name each of the {len(sequences)} sequences, got {len(names)} ids")
    rows = [as_sequence(x, "the sequence", f"client {name}") for name, x in zip(names, sequences)]
    for name, row in zip(names, rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"client {name}: the sequence has {len(row)} elements, that of client {names[0]} has {len(rows[0])}; "
                "all clients must send the same number"
            )
    return np.stack(rows)


def require_indices(rows: Numbers, ids: Sequence[Any] | None = None) -> None:
    """Every row must hold distinct integers of at least 0.

    Args:
        rows: (N, k) from `as_matrix`.
        ids: (N,) names for error messages.

    Raises:
        ValueError: naming the client and the value.
    """
    for position, row in enumerate(rows):
        who = f"client {position if ids is None else ids[position]}"
        if row.dtype.kind != "i":
            raise ValueError(f"{who}: overlap compares coordinate indices, got fractional values (float64)")
        ordered = np.sort(row)
        if ordered[0] < 0:
            raise ValueError(f"{who}: coordinate indices must be at least 0, got {ordered[0]}")
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(again):
            raise ValueError(f"{who}: the coordinate index {again[0]} appears more than once in the sequence")
