"""The number of clusters from the clients' distances alone: average linkage, its height chosen by silhouette."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedclust.clustering.checks import as_distances
from fedclust.clustering.linkage import Labels, average_linkage_cuts, silhouette

LOW_VARIATION = 0.25
# Equal distances up to noise give a few hundredths, whatever K.
STRUCTURE = 0.1
# Relative to the largest distance: no more than what float32 means make of equal distances.
_EQUAL = 1e-6


@dataclass(frozen=True)
class AutomaticClusters:
    """Outcome of `automatic_clusters`.

    Attributes:
        labels: (N,) int64, numbered in the order of their first member.
        n_clusters: K.
        curve: K → mean silhouette of every number of clusters that was tried.
        variation: Standard deviation over mean of the distances between different clients; None for one client.
        reason: Why there is one cluster only, if it was not chosen by silhouette.
    """

    labels: Labels
    n_clusters: int
    curve: dict[int, float] = field(default_factory=dict)
    variation: float | None = None
    reason: str | None = None


def automatic_clusters(distances: Any) -> AutomaticClusters:
    """Average-linkage clusters with the number of the highest silhouette, ties to fewer clusters (FMCL).

    The paper gives no window for K. Here: where the distances vary little (coefficient of variation below .25) it is
    2 … max(2, ⌈√N⌉), else 2 … min(N − 1, ⌈N/2⌉). Where its largest K is the best one, with a silhouette above .1 (below
    that there is no structure to speak of), it is doubled, up to N − 1, until that is no longer so: many groups without
    a common class are nearly all equally far apart. No silhouette above 0, equal distances, or two clients and fewer:
    one cluster.

    Args:
        distances: (N, N) symmetric, at least 0, exactly 0 on the diagonal.

    Raises:
        ValueError: If it is no such matrix; similarities, whose diagonal is 1, are refused too.
    """
    matrix = as_distances(distances)
    n = len(matrix)
    between = matrix[np.triu_indices(n, 1)]
    if n <= 2:
        return _one(n, None, f"{n} clients are too few to be grouped")
    mean = float(between.mean())
    variation = float(between.std()) / mean if mean > 0 else 0.0
    if np.ptp(between) <= _EQUAL * between.max():
        return _one(n, variation, f"all distances are equal to {mean:g}")
    highest = min(max(2, math.ceil(math.sqrt(n))) if variation < LOW_VARIATION else math.ceil(n / 2), n - 1)
    cuts: dict[int, Labels] = {}
    curve: dict[int, float] = {}
    while True:
        more = average_linkage_cuts(matrix, range(len(cuts) + 2, highest + 1))
        cuts |= more
        curve |= {k: score for k, labels in more.items() if (score := silhouette(matrix, labels)) is not None}
        best = min(curve, key=lambda k: (-curve[k], k))
        if curve[best] <= 0:
            reason = "no number of clusters has a silhouette above 0"
            return AutomaticClusters(np.zeros(n, dtype=np.int64), 1, curve, variation, reason)
        if best < highest or highest == n - 1 or curve[best] <= STRUCTURE:
            return AutomaticClusters(cuts[best], best, curve, variation)
        highest = min(2 * highest, n - 1)


def _one(n: int, variation: float | None, reason: str) -> AutomaticClusters:
    return AutomaticClusters(np.zeros(n, dtype=np.int64), 1, {}, variation, reason)
