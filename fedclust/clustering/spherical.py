"""Clusters of directions: cosine reassignment to a fixed point, and the weights of an aggregation by similarity.

Every cosine to a weighted mean follows from the inner products of the vectors: with the shares w of a cluster's members
and the products K, its centroid c has g·c = (K w) and ‖c‖² = wᵀ K w. So vectors as long as a model are read once, in
float64 pieces, however often they are reassigned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CAP = 100
_VALUES = 2**22  # values converted to float64 at a time
_DECIMALS = 12  # cosines that differ by less tie: their difference is rounding


@dataclass(frozen=True)
class SphericalClusters:
    """Outcome of `reassign`.

    Attributes:
        labels: (N,) int64, clusters numbered 0..K−1 without gaps.
        cosines: (N,) float64, cosine of every vector to the centroid of its cluster; 0 where one of them is 0.
        n_iter: Reassignments made.
        converged: Whether a fixed point was reached before the cap.
    """

    labels: Tensor
    cosines: Tensor
    n_iter: int
    converged: bool


def inner_products(vectors: Tensor) -> Tensor:
    """Inner products of all pairs of vectors (N, d), as (N, N) float64; `vectors` is read in pieces."""
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for part in torch.split(vectors, max(1, _VALUES // max(1, len(vectors))), dim=1):
        wide = part.to(device="cpu", dtype=torch.float64)
        total += wide @ wide.T
    return (total + total.T) / 2


def cosines(products: Tensor) -> Tensor:
    """Cosines (N, N) out of the inner products; 0 where one of the vectors is 0, 1 on the diagonal else."""
    return _ratio(products, products.diagonal(), products.diagonal())


def reassign(products: Tensor, labels: Tensor, weights: Tensor, max_iter: int = _CAP) -> SphericalClusters:
    """Moves every vector to the centroid of the smallest cosine distance until nothing moves (PA-CFL, Sec. 5.6).

    Empty clusters are dropped; ties go to the lower cluster; a zero vector keeps its cluster.

    Args:
        products: (N, N) inner products of the vectors, see `inner_products`.
        labels: (N,) int64, the clusters to start from.
        weights: (N,) positive, such as numbers of rows.
        max_iter: Cap on the reassignments; 0 leaves the clusters as they are.

    Raises:
        ValueError: If shapes do not fit, or a weight is not positive.
    """
    n = len(products)
    if products.shape != (n, n) or labels.shape != (n,) or weights.shape != (n,):
        raise ValueError(
            f"need products (N, N), labels (N,) and weights (N,), got {tuple(products.shape)}, {tuple(labels.shape)} "
            f"and {tuple(weights.shape)}"
        )
    if not bool((weights > 0).all()):
        raise ValueError(f"weights must be above 0, got {weights.tolist()}")
    current = torch.unique(labels, return_inverse=True)[1]
    still = products.diagonal() == 0
    for n_iter in range(max_iter):
        similarity = to_centroids(products, current, weights)
        nearest = torch.where(still, current, similarity.round(decimals=_DECIMALS).argmax(1))
        moved = torch.unique(nearest, return_inverse=True)[1]
        if torch.equal(moved, current):
            return SphericalClusters(current, _own(similarity, current), n_iter + 1, True)
        current = moved
    return SphericalClusters(current, _own(to_centroids(products, current, weights), current), max_iter, max_iter == 0)


def to_centroids(products: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Cosines (N, K) of all vectors to the weighted means of the clusters; 0 where one of the two is 0.

    Args:
        products: (N, N) inner products of the vectors.
        labels: (N,) int64 in 0..K−1.
        weights: (N,) positive.
    """
    shares = member_shares(labels, weights)
    inner = products @ shares
    return _ratio(inner, products.diagonal(), (shares * inner).sum(0))


def member_shares(labels: Tensor, weights: Tensor) -> Tensor:
    """Each member's share of its cluster's weight, (N, K) float64; columns add up to 1."""
    member = torch.nn.functional.one_hot(labels, int(labels.max()) + 1) * weights.double().unsqueeze(1)
    return member / member.sum(0)


def weighted_means(vectors: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of every cluster's members, (K, d) of the type of `vectors`."""
    return member_shares(labels, weights).T.to(vectors) @ vectors


def softmax_means(vectors: Tensor, clusters: SphericalClusters) -> Tensor:
    """Means of every cluster's members, weighted by the softmax of their cosine to the centroid (PA-CFL, Sec. 5.7).

    Args:
        vectors: (N, d).
        clusters: Their clusters.

    Returns:
        (K, d).
    """
    return weighted_means(vectors, clusters.labels, clusters.cosines.exp())


def _own(similarity: Tensor, labels: Tensor) -> Tensor:
    return similarity.gather(1, labels.unsqueeze(1)).squeeze(1)


def _ratio(inner: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Inner products over both norms, whose squares are given; 0 where one of them is 0."""
    norms = rows.clamp(min=0).sqrt().unsqueeze(1) * columns.clamp(min=0).sqrt().unsqueeze(0)
    return torch.where(norms > 0, inner / norms.where(norms > 0, 1.0), 0.0).clamp(-1, 1)
