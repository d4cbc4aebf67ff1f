"""Distances between whole gradients: the metrics that the PA-CFL paper compares with its own in Figure 11a."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist, squareform

from fedclust.arrays import array_of
from fedclust.checks import choice
from fedclust.clustering.sequences import as_numbers

GRADIENT_METRICS = ("l2", "l1", "cosine", "pearson", "max_norm", "mahalanobis")
_VALUES = 2**22  # values converted to float64 at a time


def gradient_distances(gradients: Any, metric: str, ids: Sequence[Any] | None = None) -> NDArray[np.float64]:
    """Distances between all pairs of gradients.

    * ``l2``, ``l1``, ``max_norm``: norms of the difference.
    * ``cosine``: 1 − cosine. A zero gradient has distance 1 to all others, 0 to another zero gradient.
    * ``pearson``: 1 − correlation over the coordinates; a gradient of equal values counts as zero.
    * ``mahalanobis``: with the diagonal covariance over the clients, that is l2 after each coordinate was divided by
      its standard deviation (N − 1 in the denominator). Coordinates equal in all clients say nothing and are left out.

    Args:
        gradients: (N, d) array or tensor, one gradient per client; float32 is read in pieces, not copied as a whole.
        metric: one of `GRADIENT_METRICS`.
        ids: (N,) client names for error messages; positions if None.

    Returns:
        (N, N) float64, symmetric, exactly 0 on the diagonal and between equal gradients.

    Raises:
        ValueError: for an unknown metric, another shape, NaN or infinite values.
    """
    choice("metric", metric, GRADIENT_METRICS)
    matrix = array_of(gradients)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise ValueError(f"gradients must have shape (clients, coordinates), got {matrix.shape}")
    n, d = matrix.shape
    step = max(1, _VALUES // n)
    for i, row in enumerate(matrix):
        as_numbers(row, "the gradient", f"client {i if ids is None else ids[i]}")
    center, norm = _standard(matrix, metric)
    total = np.zeros(n * (n - 1) // 2)
    for start in range(0, d, step):
        block = np.asarray(matrix[:, start : start + step], np.float64)
        if metric == "l1":
            total += pdist(block, "cityblock")
        elif metric == "max_norm":
            total = np.maximum(total, pdist(block, "chebyshev"))
        elif metric == "mahalanobis":
            total += pdist(_whitened(block), "sqeuclidean")
        else:
            total += pdist((block - center) / norm, "sqeuclidean")
    return _finished(squareform(total, checks=False) if n > 1 else np.zeros((1, 1)), metric, norm)


def _standard(matrix: NDArray[Any], metric: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What to subtract from each row, then to divide it by, for norm 1: (N, 1) each; infinity for zero rows."""
    n = len(matrix)
    center, norm = np.zeros((n, 1)), np.ones((n, 1))
    if metric not in ("cosine", "pearson"):
        return center, norm
    for i, row in enumerate(matrix):
        values = row.astype(np.float64)
        if metric == "pearson":
            center[i] = values.mean()
            values = values - center[i] if values.min() < values.max() else np.zeros_like(values)
        largest = np.abs(values).max()  # divided out first: squares of tiny gradients underflow
        norm[i] = largest * np.linalg.norm(values / largest) if largest > 0 else np.inf
    return center, norm


def _whitened(block: NDArray[np.float64]) -> NDArray[np.float64]:
    """Columns divided by their standard deviation over the rows; constant columns become 0."""
    if len(block) < 2:
        return np.zeros_like(block)
    constant = block.min(axis=0) == block.max(axis=0)
    deviation = np.std(block, axis=0, ddof=1)
    usable = ~constant & (deviation > 0)
    return np.where(usable, block - block[0], 0.0) / np.where(usable, deviation, 1.0)


def _finished(distances: NDArray[np.float64], metric: str, norm: NDArray[np.float64]) -> NDArray[np.float64]:
    """From the summed values to the distance."""
    if metric in ("l1", "max_norm"):
        return distances
    if metric in ("l2", "mahalanobis"):
        return np.sqrt(distances)
    zero = np.isinf(norm)
    one_is_zero = zero != zero.T
    return np.where(one_is_zero, 1.0, np.minimum(distances / 2, 2.0))
