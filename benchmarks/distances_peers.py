"""What benchmarks/distances.py compares with: published packages, a plain loop, and the kernel's inner loop alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from fedclust.clustering.dtw import advance

Distance = Callable[[np.ndarray, np.ndarray], Any]


def pypi_fastdtw() -> Distance:
    """FastDTW of PyPI at radius 1 with its default cost |x − y|."""
    from fastdtw import fastdtw

    return lambda a, b: fastdtw(a, b, radius=1)[0]


def dtaidistance() -> Distance:
    """Exact DTW in C with |x − y|."""
    from dtaidistance import dtw

    return lambda a, b: dtw.distance(a.astype(float), b.astype(float), use_c=True, inner_dist="euclidean")


def tslearn() -> Distance:
    """Exact DTW in numba with (x − y)²."""
    from tslearn.metrics import dtw

    return lambda a, b: dtw(a.astype(float), b.astype(float))


PEERS = {"PyPI fastdtw, radius 1": pypi_fastdtw, "dtaidistance, C": dtaidistance, "tslearn": tslearn}


@njit(nogil=True)
def row_by_row(a: Any, b: Any) -> int:
    """Exact DTW as one would first write it: two nested loops over one row of the matrix."""
    row = np.full(len(b) + 1, 2**62)
    row[0] = 0
    for x in a:
        corner, left = row[0], 2**62
        row[0] = 2**62
        for j in range(len(b)):
            best = min(min(row[j + 1], left), corner)
            corner = row[j + 1]
            left = best + abs(x - b[j])
            row[j + 1] = left
    return row[len(b)]


@njit(nogil=True)
def _steps(operands: Any, times: int) -> None:
    length = operands.shape[1] - 1
    up, left, corner, cur = operands[0, :length], operands[0, 1:], operands[1, :length], operands[2, 1:]
    a, b = operands[3, :length], operands[4, :length]
    for _ in range(times):
        advance(cur, up, left, corner, a, b)


def step_speed(kind: Any, repeats: int) -> float:
    """Cells per second of the inner loop alone: operands that stay in the first-level cache, no borders, no turns."""
    operands = np.ones((5, 4096 // np.dtype(kind).itemsize), kind)
    times = 20_000
    _steps(operands, 1)
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        _steps(operands, times)
        best = min(best, time.thread_time() - start)
    return times * (operands.shape[1] - 1) / best
