"""Similarity of clients by the coordinates that their sequences share.

The clients are listed under the coordinates that they name, and every pair under one coordinate adds to its product: a
sparse matrix product whose work is the number of such meetings, not N² k, with one (N, N) result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclust.jit import jit

_BLOCK = 2**22  # coordinates listed at a time
_FEW = 2**18  # below so many indices sorting them costs less than listing all coordinates


def index_overlap(rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Distances 1 − |A ∩ B| / |A ∪ B| of the clients' index sets.

    Args:
        rows: (N, k) distinct coordinate indices per client.

    Returns:
        (N, N) float64 in [0, 1], symmetric, 0 for equal sets.
    """
    k = rows.shape[1]
    shared = _products(rows, np.ones(k))
    distances = 1.0 - shared / (2 * k - shared)
    np.fill_diagonal(distances, 0.0)
    return distances


def rank_overlap(rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Distances 1 − cosine of the vectors that hold 1 / (1 + rank) at a client's coordinates, rank counted from 1.

    Args:
        rows: (N, k) distinct coordinate indices per client, the most important first.

    Returns:
        (N, N) float64 in [0, 1], symmetric, 0 for equal sequences; rounded to 12 decimals.
    """
    weights = 1.0 / np.arange(2, rows.shape[1] + 2)
    distances = 1.0 - _products(rows, weights) / np.sum(weights**2)
    np.fill_diagonal(distances, 0.0)
    # The last digits depend on the order of summation: they must neither tell equal sequences apart nor break ties.
    return np.clip(np.round(distances, 12), 0.0, 1.0)


def _products(rows: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N, N) float64: sums of the products of the weights over the coordinates that both name; the diagonal is 0."""
    columns = rows - rows.min()
    if rows.size < _FEW or columns.max() > 64 * rows.size:
        columns = np.unique(columns, return_inverse=True)[1].reshape(rows.shape)
    upper = np.zeros((len(rows), len(rows)))
    n_columns = int(columns.max()) + 1
    for start in range(0, n_columns, _BLOCK):
        _add_meetings(columns, weights, start, min(_BLOCK, n_columns - start), upper)
    return upper + upper.T


@jit
def _add_meetings(columns: Any, weights: Any, start: int, width: int, upper: Any) -> None:
    """Adds the products of all pairs of clients that meet at one of the coordinates [start, start + width)."""
    n, k = columns.shape
    ends = np.zeros(width + 1, np.int64)
    for i in range(n):
        for rank in range(k):
            at = columns[i, rank] - start
            if 0 <= at < width:
                ends[at + 1] += 1
    for at in range(width):
        ends[at + 1] += ends[at]
    clients, values = np.empty(ends[width], np.int32), np.empty(ends[width])
    for i in range(n):
        for rank in range(k):
            at = columns[i, rank] - start
            if 0 <= at < width:
                clients[ends[at]] = i
                values[ends[at]] = weights[rank]
                ends[at] += 1
    first = 0
    for at in range(width):
        for p in range(first, ends[at]):
            row, value = upper[clients[p]], values[p]
            for q in range(p + 1, ends[at]):
                row[clients[q]] += value * values[q]
        first = ends[at]
