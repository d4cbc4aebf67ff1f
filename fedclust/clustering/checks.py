"""Checks and guards shared by the clustering functions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor

_lock = threading.RLock()


@lru_cache(maxsize=1)
def _pools() -> ThreadpoolController:
    """The process's thread pools, looked up once: finding them takes milliseconds, limiting them microseconds."""
    import sklearn.cluster  # noqa: F401 (its OpenMP must be loaded before the look-up)

    return ThreadpoolController()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the block alone, with one BLAS and one OpenMP thread.

    Results then depend neither on the number of threads nor on other threads of the process.
    """
    # The BLAS limit belongs to the whole process: without the lock two overlapping blocks
    # would restore each other's limit. The lock also keeps numba's default threading layer,
    # which aborts the process when two threads enter it, to one caller at a time.
    with _lock, _pools().limit(limits=1):
        yield


def prefix(who: str) -> str:
    """Start of an error message: ``"client 3: "``, or nothing when ``who`` is empty."""
    return f"{who}: " if who else ""


def check_count(value: Any, name: str, least: int, who: str = "") -> int:
    """Return ``value`` as an int.

    Raises:
        ValueError: if it is not an integer of at least ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{prefix(who)}{name} must be an integer of at least {least}, got {value!r}")
    return int(value)


def as_rows(x: Any, name: str = "x", who: str = "") -> Tensor:
    """Return ``x`` (tensor, array or nested list) as a detached finite float tensor (n, d).

    float64 stays float64, everything else becomes float32.

    Raises:
        ValueError: if ``x`` is not two-dimensional, has no columns, or holds NaN or infinite values.
    """
    rows = x.detach() if isinstance(x, Tensor) else torch.as_tensor(np.ascontiguousarray(x))
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(f"{prefix(who)}{name} must have shape (rows, features), got {tuple(rows.shape)}")
    if rows.is_complex():
        raise ValueError(f"{prefix(who)}{name} must be real, got {rows.dtype}")
    rows = rows if rows.dtype == torch.float64 else rows.to(torch.float32)
    bad = int((~torch.isfinite(rows)).any(dim=1).sum())
    if bad:
        raise ValueError(f"{prefix(who)}{bad} of {len(rows)} rows of {name} hold NaN or infinite values")
    return rows


def as_distances(distances: Any) -> NDArray[np.float64]:
    """`distances` as float64 (N, N).

    Raises:
        ValueError: if it is not square, finite, at least 0, symmetric and zero on the diagonal.
    """
    matrix = np.asarray(distances, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(f"distances must be a square matrix of at least one client, got shape {matrix.shape}")
    wrong = np.argwhere(~(np.isfinite(matrix) & (matrix >= 0)))
    if len(wrong):
        i, j = wrong[0]
        raise ValueError(f"distances must be finite and at least 0, got {matrix[i, j]} between clients {i} and {j}")
    wrong = np.argwhere(matrix != matrix.T)
    if len(wrong):
        i, j = wrong[0]
        raise ValueError(
            f"distances must be symmetric, got {matrix[i, j]} and {matrix[j, i]} between clients {i} and {j}"
        )
    if matrix.diagonal().any():
        i = int(matrix.diagonal().nonzero()[0][0])
        raise ValueError(
            f"distances must be 0 on the diagonal, got {matrix[i, i]} for client {i}: are these similarities?"
        )
    return matrix
