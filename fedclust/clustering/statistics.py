"""Clustering metrics from sums that clients over disjoint rows may add up: no row has to leave a client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedclust.metrics import collapsed, davies_bouldin_from_sums, scores_from_contingency

SUMMED = ("n", "recon_sum", "counts", "sums", "square_sum", "contingency")
DISPERSION = ("distance_sums", "silhouette_sum", "silhouette_input_sum")
"""Sums over rows that need the cluster means of all rows, see `metrics_from_statistics`."""


def add_statistics(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Adds the statistics of several clients.

    Args:
        parts: Mappings with "n" (), "recon_sum" (), "counts" (K,), "sums" (K, d), "square_sum" (d,) and, where there
            are labels, "contingency" (C, K).

    Raises:
        ValueError: If there is no row at all.
    """
    total: dict[str, Tensor] = {}
    for part in parts:
        for name in SUMMED:
            if name in part:
                total[name] = total[name] + part[name] if name in total else part[name]
    if not total or int(total["n"]) == 0:
        raise ValueError("no client has a row in this split, so nothing can be evaluated on it")
    return total


def cluster_means(statistics: Mapping[str, Tensor]) -> Tensor:
    """Mean latent of every cluster (K, d) float64; 0 for an empty one."""
    return statistics["sums"] / statistics["counts"].clamp(min=1).unsqueeze(1)


def silhouette_sum(z: Tensor, labels: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    """Sum of the simplified silhouettes of rows; clients over disjoint rows may add it up.

    The simplified silhouette (Hruschka, de Castro and Campello 2004; Vendramin, Campello and Hruschka 2010) takes the
    distance to a cluster's mean for the mean distance to its rows: (b - a) / max(a, b) with a to the own cluster's mean
    and b to the nearest other one. As in the silhouette itself, the only row of a cluster scores 0; so does a row whose
    two distances are both 0.

    Args:
        z: (n, d) float64 rows.
        labels: (n,) cluster of each row.
        means: (K, d) float64 cluster means over all clients.
        counts: (K,) rows of each cluster over all clients; clusters without rows are left out.

    Returns:
        () float64; 0 where fewer than two clusters hold rows.
    """
    held = counts > 0
    if not len(z) or int(held.sum()) < 2:
        return torch.zeros((), dtype=torch.float64)
    distances = torch.cdist(z, means.to(z), compute_mode="donot_use_mm_for_euclid_dist")
    own = distances.gather(1, labels.unsqueeze(1)).squeeze(1)
    others = distances.masked_fill(~held, math.inf).scatter(1, labels.unsqueeze(1), math.inf).min(1).values
    larger = torch.maximum(own, others)
    scores = torch.where(larger == 0, 0.0, (others - own) / larger)
    return torch.where(counts[labels] > 1, scores, 0.0).sum()


def metrics_from_statistics(statistics: Mapping[str, Tensor], dispersion: Mapping[str, Tensor]) -> dict[str, float]:
    """All metrics of a clustering from its sums.

    Args:
        statistics: What `add_statistics` gave.
        dispersion: Sums over the rows that need their `cluster_means`: "distance_sums" (K,), the distances to the own
            cluster's mean; perhaps "silhouette_sum" and "silhouette_input_sum" (), the `silhouette_sum` of latents, and
            of rows with the decoded means.

    Returns:
        "recon" (mean squared error per feature), "dbi" (Davies-Bouldin in the latent space, +inf where degenerate),
        "populated" (clusters with rows), "latent_variance", "collapsed" (0 or 1), with their sums "silhouette" and
        "silhouette_input" (mean simplified silhouettes, -inf where fewer than two clusters hold rows), and with labels
        "acc", "nmi", "ari".
    """
    n = int(statistics["n"])
    mean = statistics["sums"].sum(0) / n
    variance = float((statistics["square_sum"] / n - mean.square()).clamp(min=0).mean())
    metrics = {
        "recon": float(statistics["recon_sum"]) / n,
        "dbi": davies_bouldin_from_sums(statistics["counts"], statistics["sums"], dispersion["distance_sums"]),
        "populated": float((statistics["counts"] > 0).sum()),
        "latent_variance": variance,
        "collapsed": float(collapsed(statistics["counts"], variance) is not None),
    }
    for name in ("silhouette", "silhouette_input"):
        if f"{name}_sum" in dispersion:
            metrics[name] = float(dispersion[f"{name}_sum"]) / n if metrics["populated"] > 1 else -math.inf
    if "contingency" in statistics:
        metrics |= scores_from_contingency(statistics["contingency"].to(torch.int64))
    return metrics
