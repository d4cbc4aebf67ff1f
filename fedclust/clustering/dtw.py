"""Exact dynamic time warping, compiled (the recursion of the PA-CFL paper's Section 3.3).

The cost matrix is walked along its anti-diagonals: their cells do not depend on each other, so the inner loop has no
branch and runs in the processor's vector registers. Three anti-diagonals and one row are kept, never the matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedclust.jit import jit

Array = Any
_STRIP_BYTES = 6144  # longest stretch of an anti-diagonal, so that all of its operands stay in the first-level cache


@jit
def advance(cur: Array, up: Array, left: Array, corner: Array, a: Array, b: Array) -> None:
    """One stretch of an anti-diagonal, from the two before it."""
    for t in range(len(cur)):
        best = up[t] if up[t] < left[t] else left[t]
        best = corner[t] if corner[t] < best else best
        forth = a.dtype.type(a[t] - b[t])
        back = a.dtype.type(b[t] - a[t])
        cur[t] = a.dtype.type(best + (forth if forth > back else back))


@jit
def dtw_cost(a: Array, b_reversed: Array, never: Any) -> Any:
    """Dynamic time warping distance with |x − y| as the local cost, O(len(a) + len(b)) memory.

    Args:
        a: (m,) int32, int64 or float64.
        b_reversed: (n,) the second sequence from its end to its start, same type.
        never: a value of that type above every possible distance.

    Returns:
        The distance, in the type of the input.
    """
    n = len(b_reversed)
    n_strips = -(-len(a) * a.itemsize // _STRIP_BYTES)
    height = -(-len(a) // n_strips)
    edge = np.full(n + 1, never, a.dtype)  # edge[j + 1]: cell j of the row above the strip, edge[0] left of it
    edge[0] = 0
    diagonals = np.empty((3, height + 2), a.dtype)  # slot i + 1 holds row i, slot 0 the row above
    for start in range(0, len(a), height):
        rows = min(height, len(a) - start)
        part = a[start : start + rows]
        before, last, cur = diagonals[0], diagonals[1], diagonals[2]
        before[0], before[1] = edge[0], never
        last[0], last[1] = edge[1], never
        edge[0] = never
        for d in range(rows + n - 1):
            lo, hi = max(0, d - n + 1), min(d + 1, rows)
            b = b_reversed[n - 1 - d + lo : n - 1 - d + hi]
            advance(cur[lo + 1 : hi + 1], last[lo:hi], last[lo + 1 : hi + 1], before[lo:hi], part[lo:hi], b)
            cur[hi + 1] = never
            if d + 2 <= n:
                cur[0] = edge[d + 2]
            if d + 1 >= rows:
                edge[d + 2 - rows] = cur[rows]
            before, last, cur = last, cur, before
    return edge[n]


@jit
def dtw_pairs(rows: Array, rows_reversed: Array, first: Array, second: Array, never: Any, out: Array) -> None:
    """Distances of many pairs of rows, into `out`.

    Args:
        rows: (N, k) sequences.
        rows_reversed: (N, k) the same, each from its end to its start.
        first: (pairs,) row index of the one side.
        second: (pairs,) row index of the other.
        never: as in `dtw_cost`.
        out: (pairs,) float64.
    """
    for p in range(len(first)):
        out[p] = dtw_cost(rows[first[p]], rows_reversed[second[p]], never)
