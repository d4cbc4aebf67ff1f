"""Clusters of directions: cosine reassignment to a fixed point, and the weights of an aggregation by similarity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CAP = 100


@dataclass(frozen=True)
class SphericalClusters:
    """Outcome of `reassign`.

    Attributes:
        labels: (N,) int64, clusters numbered 0..K−1 without gaps.
        centroids: (K, d) weighted means of the members.
        n_iter: Reassignments made.
        converged: Whether a fixed point was reached before the cap.
    """

    labels: Tensor
    centroids: Tensor
    n_iter: int
    converged: bool


def reassign(vectors: Tensor, labels: Tensor, weights: Tensor, max_iter: int = _CAP) -> SphericalClusters:
    """Moves every vector to the centroid of the smallest cosine distance until nothing moves (PA-CFL, Sec. 5.6).

    Empty clusters are dropped; ties go to the lower cluster; a zero vector keeps its cluster.

    Args:
        vectors: (N, d).
        labels: (N,) int64, the clusters to start from.
        weights: (N,) positive, such as numbers of rows.
        max_iter: Cap on the reassignments.

    Raises:
        ValueError: If shapes do not fit, or a weight is not positive.
    """
    if vectors.ndim != 2 or labels.shape != (len(vectors),) or weights.shape != (len(vectors),):
        raise ValueError(
            f"need vectors (N, d), labels (N,) and weights (N,), got {tuple(vectors.shape)}, {tuple(labels.shape)} "
            f"and {tuple(weights.shape)}"
        )
    if not bool((weights > 0).all()):
        raise ValueError(f"weights must be above 0, got {weights.tolist()}")
    current = torch.unique(labels, return_inverse=True)[1]
    still = vectors.norm(dim=1) == 0
    for n_iter in range(1, max_iter + 1):
        similarity = cosine(vectors, weighted_means(vectors, current, weights))
        nearest = torch.where(still, current, similarity.argmax(1))
        moved = torch.unique(nearest, return_inverse=True)[1]
        if torch.equal(moved, current):
            return SphericalClusters(current, weighted_means(vectors, current, weights), n_iter, True)
        current = moved
    return SphericalClusters(current, weighted_means(vectors, current, weights), max_iter, False)


def weighted_means(vectors: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of every cluster's members, (K, d)."""
    n_clusters = int(labels.max()) + 1
    member = torch.nn.functional.one_hot(labels, n_clusters).to(vectors.dtype) * weights.to(vectors.dtype).unsqueeze(1)
    return (member / member.sum(0)).T @ vectors


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine similarities (N, K); 0 where one of the vectors is 0."""
    norms = a.norm(dim=1).unsqueeze(1) * b.norm(dim=1).unsqueeze(0)
    return torch.where(norms > 0, (a @ b.T) / norms.clamp(min=torch.finfo(a.dtype).tiny), torch.zeros(()).to(a))


def softmax_means(vectors: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """Means of every cluster's members, weighted by the softmax of their cosine to the centroid (PA-CFL, Sec. 5.7).

    Args:
        vectors: (N, d).
        labels: (N,) int64 in 0..K−1.
        centroids: (K, d).

    Returns:
        (K, d).
    """
    own = cosine(vectors, centroids).gather(1, labels.unsqueeze(1)).squeeze(1)
    return weighted_means(vectors, labels, own.exp())
