"""FastDTW, compiled (Salvador and Chan 2007; the PA-CFL paper's Section 3.3).

Coarse to fine: halve both sequences by averaging neighbours until one is shorter than radius + 2, align these exactly,
then at each finer level search only near the coarser path. A path is monotone and connected, so the cells near it form
one range per row; paths and windows are kept as such ranges.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedclust.jit import jit

Array = Any
_UP, _LEFT, _CORNER = 0, 1, 2


@jit
def _halve(x: Array) -> Array:
    """Means of neighbours; an odd last element is dropped."""
    out = np.empty(len(x) // 2)
    for i in range(len(out)):
        out[i] = (x[2 * i] + x[2 * i + 1]) / 2
    return out


@jit
def _window(path_lo: Array, path_hi: Array, n_rows: int, n_cols: int, radius: int) -> tuple[Array, Array]:
    """Ranges [lo, hi) of the finer level's rows: the coarser path widened by `radius`, each cell becoming 2 × 2."""
    lo, hi = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
    end = len(path_lo) - 1
    for i in range(n_rows):
        row = i // 2
        lo[i] = max(0, 2 * (path_lo[max(0, row - radius)] - radius))
        hi[i] = min(n_cols, 2 * (path_hi[min(end, row + radius)] + radius + 1))
    return lo, hi


@jit
def _align(a: Array, b: Array, lo: Array, hi: Array) -> tuple[Array, Array]:
    """First and last column, per row, of the cheapest path inside the window.

    Of equal predecessors the upper one is taken, then the left one: another choice leads to another window and so to
    another distance at the finer levels.
    """
    starts = np.zeros(len(a) + 1, np.int64)
    for i in range(len(a)):
        starts[i + 1] = starts[i] + hi[i] - lo[i]
    moves = np.empty(starts[-1], np.uint8)
    costs = np.full(len(b) + 1, np.inf)
    costs[0] = 0.0
    cleared = 0
    for i in range(len(a)):
        corner, left = costs[lo[i]], np.inf
        costs[cleared : lo[i] + 1] = np.inf
        cleared = lo[i]
        for j in range(lo[i], hi[i]):
            cost = abs(a[i] - b[j])
            # Added before comparing: sums can tie where the predecessors differ in their last bit.
            up, side, diagonal = costs[j + 1] + cost, left + cost, corner + cost
            corner = costs[j + 1]
            if up <= side and up <= diagonal:
                move, left = _UP, up
            elif side <= diagonal:
                move, left = _LEFT, side
            else:
                move, left = _CORNER, diagonal
            costs[j + 1] = left
            moves[starts[i] + j - lo[i]] = move
    first, last = np.full(len(a), len(b)), np.full(len(a), -1)
    i, j = len(a) - 1, len(b) - 1
    while i >= 0 and j >= 0:
        first[i], last[i] = min(first[i], j), max(last[i], j)
        move = moves[starts[i] + j - lo[i]]
        if move != _LEFT:
            i -= 1
        if move != _UP:
            j -= 1
    return first, last


@jit
def _cost(a: Array, b: Array, lo: Array, hi: Array) -> float:
    """Cost of the cheapest path inside the window."""
    costs = np.full(len(b) + 1, np.inf)
    costs[0] = 0.0
    cleared = 0
    for i in range(len(a)):
        corner, left, x = costs[lo[i]], np.inf, a[i]
        costs[cleared : lo[i] + 1] = np.inf
        cleared = lo[i]
        for j in range(lo[i], hi[i]):
            up = costs[j + 1]
            best = min(up, corner)
            left = (left if left < best else best) + abs(x - b[j])
            corner = up
            costs[j + 1] = left
    return costs[len(b)]


@jit
def fastdtw_cost(a: Array, b: Array, radius: int) -> float:
    """FastDTW distance with |x − y| as the local cost.

    Args:
        a: (m,) float64.
        b: (n,) float64.
        radius: at least 1.
    """
    levels = [(a, b)]
    while min(len(levels[-1][0]), len(levels[-1][1])) >= radius + 2:
        levels.append((_halve(levels[-1][0]), _halve(levels[-1][1])))
    coarse_a, coarse_b = levels[-1]
    lo, hi = np.zeros(len(coarse_a), np.int64), np.full(len(coarse_a), len(coarse_b))
    for level in range(len(levels) - 1, 0, -1):
        first, last = _align(levels[level][0], levels[level][1], lo, hi)
        lo, hi = _window(first, last, len(levels[level - 1][0]), len(levels[level - 1][1]), radius)
    return _cost(a, b, lo, hi)


@jit
def fastdtw_pairs(rows: Array, first: Array, second: Array, radius: int, out: Array) -> None:
    """FastDTW distances of many pairs of rows, into `out`.

    The method is not quite symmetric (ties), so the smaller sequence in dictionary order comes first: the order in
    which the rows are given then changes nothing.

    Args:
        rows: (N, k) float64.
        first: (pairs,) row index of the one side.
        second: (pairs,) row index of the other.
        radius: at least 1.
        out: (pairs,) float64.
    """
    for p in range(len(first)):
        a, b = rows[first[p]], rows[second[p]]
        at = 0
        while at < len(a) - 1 and a[at] == b[at]:
            at += 1
        out[p] = fastdtw_cost(b, a, radius) if a[at] > b[at] else fastdtw_cost(a, b, radius)
