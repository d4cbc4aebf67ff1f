"""Clusters of clients by average linkage, their number by silhouette; and figures on how well clusters separate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import cut_tree
from scipy.cluster.hierarchy import linkage as scipy_linkage
from scipy.spatial.distance import squareform
from sklearn.metrics import silhouette_score

from fedclust.clustering.trees import by_first

Labels = NDArray[np.int64]


def linkage_clusters(distances: Any) -> Labels:
    """Average-linkage clusters with the number of clusters of the highest silhouette, ties to fewer clusters.

    Args:
        distances: (N, N) symmetric, zero diagonal.

    Returns:
        (N,) int64, numbered in the order of their first member; one cluster for N <= 2 or equal distances.
    """
    matrix = np.asarray(distances, dtype=np.float64)
    n = len(matrix)
    condensed = squareform(matrix, checks=False)
    if n <= 2 or np.ptp(condensed) == 0:
        return np.zeros(n, dtype=np.int64)
    best, chosen = -np.inf, np.zeros(n, dtype=np.int64)
    for labels in average_linkage_cuts(matrix, range(2, n)).values():
        score = silhouette(matrix, labels)
        if score is not None and score > best:
            best, chosen = score, labels
    return chosen


def average_linkage_cuts(distances: NDArray[np.float64], counts: Iterable[int]) -> dict[int, Labels]:
    """Average-linkage clusters for several numbers of clusters.

    Args:
        distances: (N, N) symmetric, zero diagonal.
        counts: Numbers of clusters K, each in 1..N.

    Returns:
        K → (N,) int64, numbered in the order of their first member; exactly K clusters, also where heights are equal.
    """
    wanted = list(counts)
    if not wanted:
        return {}
    tree = scipy_linkage(squareform(distances, checks=False), method="average")
    return {k: by_first(labels) for k, labels in zip(wanted, cut_tree(tree, wanted).T, strict=True)}


def silhouette(distances: Any, labels: Any) -> float | None:
    """Mean silhouette of clusters on a distance matrix; None outside 2..N−1 clusters."""
    count = len(np.unique(labels))
    if not 2 <= count <= len(labels) - 1:
        return None
    return float(silhouette_score(distances, labels, metric="precomputed"))


def separation(distances: Any, labels: Any) -> float | None:
    """Smallest distance between clusters less the largest within one (PA-CFL's Δ); None for one cluster."""
    matrix, values = np.asarray(distances), np.asarray(labels)
    same = values[:, None] == values[None, :]
    if same.all():
        return None
    return float(matrix[~same].min() - matrix[same].max())
