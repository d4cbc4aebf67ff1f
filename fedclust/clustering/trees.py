"""Clusters of clients without a given number: cut the minimum spanning tree as long as Davies-Bouldin allows it.

Source: PA-CFL, Sections 3.4 and 5.4.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedclust.clustering.checks import as_distances

Labels = NDArray[np.int64]
Matrix = NDArray[np.float64]
_ALONE = "leaves a client alone"
_NO_GAP = "two medoids coincide"
# Means and indices that differ by less are equal: their difference is the rounding of sums.
_ROUNDING = 1 + 1e-12


class Edge(NamedTuple):
    """An edge of the tree; `a` and `b` are ids, positions in the matrix if there are no ids."""

    a: Any
    b: Any
    weight: float


class Rejection(NamedTuple):
    """An edge that stayed, with the reason."""

    edge: Edge
    reason: str


@dataclass(frozen=True)
class AdaptiveClusters:
    """Outcome of `adaptive_clusters`.

    Attributes:
        labels: (N,) int64 cluster of each client; clusters are numbered in the order of their first client.
        clusters: the ids of each cluster's clients, in the order of the input.
        dbi: medoid Davies-Bouldin index of the clusters; None for a single one.
        removed: edges that were cut, in this order.
        rejected: edges that stayed although they were tried, in this order.
        reason: why there are no more clusters.
    """

    labels: Labels
    clusters: list[list[Any]]
    dbi: float | None
    removed: list[Edge] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    reason: str = ""


def minimum_spanning_tree(distances: Any) -> list[Edge]:
    """A minimum spanning tree of the complete graph: always N − 1 edges, those of weight 0 included.

    Among trees of equal total weight the edges that come first in the order (weight, a, b) win.

    Args:
        distances: (N, N) symmetric matrix, at least 0, with a zero diagonal.

    Returns:
        Edges (a, b, weight) with positions a < b, sorted by (weight, a, b).

    Raises:
        ValueError: if the matrix is none of the kind.
    """
    return [Edge(a, b, weight) for weight, a, b in _tree(as_distances(distances))]


def medoid_davies_bouldin(distances: Any, labels: Any) -> float | None:
    """Davies-Bouldin index with medoids as the centres (Section 3.4); lower is better.

    S of a cluster is the mean distance of its clients, the medoid included, to the medoid, M the distance between two
    medoids; the index is the mean over the clusters of the largest (S_i + S_j) / M_ij. Of equally good medoids the
    first one counts.

    Args:
        distances: (N, N) symmetric matrix, at least 0, with a zero diagonal.
        labels: (N,) integers, one value per cluster.

    Returns:
        The index; +inf if two medoids coincide (also where both spreads are 0: that is no separation); None for
        one cluster, where it is not defined.

    Raises:
        ValueError: if the matrix is none of the kind or the labels do not fit.
    """
    matrix = as_distances(distances)
    values = np.asarray(labels)
    if values.shape != (len(matrix),) or values.dtype.kind not in "iu":
        raise ValueError(f"labels must be integers of shape ({len(matrix)},), got {values.dtype} of {values.shape}")
    return _index(matrix, np.unique(values, return_inverse=True)[1])


def adaptive_clusters(distances: Any, ids: Sequence[Hashable] | None = None) -> AdaptiveClusters:
    """Cut the minimum spanning tree at its longest edges (Section 5.4).

    Edges are tried once, in descending weight. A cut is kept if every component has at least 2 clients and the medoid
    Davies-Bouldin index is finite and not above the best so far; otherwise the edge stays and the next one is tried
    (the paper leaves open whether to stop there). Where the tree or the order of equal edges is ambiguous, the order of
    the ids decides, so that the order of the clients in the input does not change the partition.

    Args:
        distances: (N, N) symmetric matrix, at least 0, with a zero diagonal.
        ids: (N,) distinct names of the clients that can be sorted; positions if None.

    Raises:
        ValueError: if the matrix is none of the kind or the ids do not fit.
    """
    matrix = as_distances(distances)
    names = _names(ids, len(matrix))
    try:
        order = np.array(sorted(range(len(names)), key=lambda i: names[i]), np.int64)
    except TypeError:
        raise ValueError(f"ids must be of one kind that can be sorted, got {names[:5]}") from None
    ordered = matrix[np.ix_(order, order)]
    edges = sorted(_tree(ordered), key=lambda edge: (-edge[0], edge[1], edge[2]))
    cuts = _Cuts(ordered, [names[i] for i in order], edges)
    for weight, a, b in edges:
        cuts.attempt(a, b, weight)
    components = np.empty(len(matrix), np.int64)
    components[order] = cuts.labels
    labels = by_first(components)
    clusters: list[list[Any]] = [[] for _ in range(int(labels.max()) + 1)]
    for name, label in zip(names, labels):
        clusters[label].append(name)
    return AdaptiveClusters(labels, clusters, cuts.dbi, cuts.removed, cuts.rejected, cuts.reason())


class _Cuts:
    """The state of the edge removal: components so far, what was cut and what was not."""

    def __init__(self, matrix: Matrix, names: list[Any], edges: list[tuple[float, int, int]]):
        self.matrix, self.names = matrix, names
        self.labels = np.zeros(len(matrix), np.int64)
        self.dbi: float | None = None
        self.removed: list[Edge] = []
        self.rejected: list[Rejection] = []
        self.neighbours: list[set[int]] = [set() for _ in names]
        for _, a, b in edges:
            self.neighbours[a].add(b)
            self.neighbours[b].add(a)

    def attempt(self, a: int, b: int, weight: float) -> None:
        """Cut the edge if that is admissible."""
        edge = Edge(self.names[a], self.names[b], weight)
        part = self._reached(a, b)
        rest = int(np.count_nonzero(self.labels == self.labels[a])) - len(part)
        if min(len(part), rest) < 2:
            self.rejected.append(Rejection(edge, _ALONE))
            return
        labels = self.labels.copy()
        labels[part] = self.labels.max() + 1
        dbi = _index(self.matrix, labels)
        best = math.inf if self.dbi is None else self.dbi
        if dbi is None or not (math.isfinite(dbi) and dbi <= best * _ROUNDING):
            no_gap = dbi is None or not math.isfinite(dbi)
            reason = _NO_GAP if no_gap else f"Davies-Bouldin {dbi:.6g} is above {best:.6g}"
            self.rejected.append(Rejection(edge, reason))
            return
        self.labels, self.dbi = labels, dbi
        self.removed.append(edge)
        self.neighbours[a].discard(b)
        self.neighbours[b].discard(a)

    def _reached(self, start: int, without: int) -> list[int]:
        """Clients connected with `start` when its edge to `without` is gone."""
        seen, stack = {start}, [start]
        while stack:
            here = stack.pop()
            for other in self.neighbours[here]:
                if other not in seen and not (here == start and other == without):
                    seen.add(other)
                    stack.append(other)
        return sorted(seen)

    def reason(self) -> str:
        """Why there are no more clusters."""
        clients = f"{len(self.names)} client{'s' if len(self.names) != 1 else ''}"
        if len(self.names) < 4:
            return f"no admissible cut: {clients}, every cluster needs at least 2"
        if self.removed:
            return f"all {len(self.names) - 1} edges tried, {len(self.removed)} cut"
        if not self.matrix.any():
            return "no admissible cut: all clients are equal"
        reasons = [rejection.reason for rejection in self.rejected]
        found = [f"{reasons.count(reason)} × {reason}" for reason in (_ALONE, _NO_GAP) if reason in reasons]
        return f"no admissible cut: {', '.join(found)}"


def _index(matrix: Matrix, labels: Labels) -> float | None:
    """`medoid_davies_bouldin` for labels 0 to K − 1, all of them used."""
    n_clusters = int(labels.max()) + 1
    if n_clusters < 2:
        return None
    medoids, spread = np.empty(n_clusters, np.int64), np.empty(n_clusters)
    for cluster in range(n_clusters):
        members = np.flatnonzero(labels == cluster)
        means = matrix[np.ix_(members, members)].mean(axis=1)
        best = int(np.flatnonzero(means <= means.min() * _ROUNDING)[0])
        medoids[cluster], spread[cluster] = members[best], means[best]
    between = matrix[np.ix_(medoids, medoids)]
    if np.count_nonzero(between == 0) > n_clusters:
        return math.inf
    np.fill_diagonal(between, math.inf)
    return float(((spread[:, None] + spread[None]) / between).max(axis=1).mean())


def _tree(matrix: Matrix) -> list[tuple[float, int, int]]:
    """Prim's algorithm on the dense matrix; edges (weight, a, b) in ascending order."""
    n = len(matrix)
    inside = np.zeros(n, bool)
    inside[0] = True
    nearest, weight = np.zeros(n, np.int64), matrix[0].copy()
    edges = []
    for _ in range(n - 1):
        outside = np.flatnonzero(~inside)
        tied = outside[weight[outside] == weight[outside].min()]
        ends = np.sort(np.stack([nearest[tied], tied]), axis=0)
        new = int(tied[np.lexsort((ends[1], ends[0]))[0]])
        a, b = sorted((int(nearest[new]), new))
        edges.append((float(weight[new]), a, b))
        inside[new] = True
        low, high = np.minimum(nearest, np.arange(n)), np.maximum(nearest, np.arange(n))
        new_low, new_high = np.minimum(new, np.arange(n)), np.maximum(new, np.arange(n))
        earlier = (new_low < low) | ((new_low == low) & (new_high < high))
        better = (matrix[new] < weight) | ((matrix[new] == weight) & earlier)
        nearest[better], weight[better] = new, matrix[new][better]
    return sorted(edges)


def by_first(labels: Labels) -> Labels:
    """The labels renumbered in the order in which they appear."""
    _, first, which = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[which.ravel()].astype(np.int64)


def _names(ids: Sequence[Hashable] | None, n: int) -> list[Any]:
    given: Any = range(n) if ids is None else ids
    # Arrays and tensors hold numbers of their own types, which would not compare or print as plain ids do.
    names: list[Any] = given.tolist() if hasattr(given, "tolist") else list(given)
    if len(names) != n or len(set(names)) != n:
        raise ValueError(f"ids must be {n} distinct names, got {len(names)} with {len(set(names))} distinct")
    return names
