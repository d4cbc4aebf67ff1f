"""Clustering metrics from sums that clients over disjoint rows may add up: no row has to leave a client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from fedclust.metrics import collapsed, davies_bouldin_from_sums, scores_from_contingency

SUMMED = ("n", "recon_sum", "counts", "sums", "square_sum", "contingency")


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


def metrics_from_statistics(
    statistics: Mapping[str, Tensor], distance_sums: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """All metrics of a clustering from its sums.

    Args:
        statistics: What `add_statistics` gave.
        distance_sums: Gives, for the cluster means (K, d), each cluster's sum of distances to its mean (K,).

    Returns:
        "recon" (mean squared error per feature), "dbi" (Davies-Bouldin in the latent space, +inf where degenerate),
        "populated" (clusters with rows), "latent_variance", "collapsed" (0 or 1), and with labels "acc", "nmi", "ari".
    """
    n = int(statistics["n"])
    mean = statistics["sums"].sum(0) / n
    variance = float((statistics["square_sum"] / n - mean.square()).clamp(min=0).mean())
    sums = distance_sums(cluster_means(statistics))
    metrics = {
        "recon": float(statistics["recon_sum"]) / n,
        "dbi": davies_bouldin_from_sums(statistics["counts"], statistics["sums"], sums),
        "populated": float((statistics["counts"] > 0).sum()),
        "latent_variance": variance,
        "collapsed": float(collapsed(statistics["counts"], variance) is not None),
    }
    if "contingency" in statistics:
        metrics |= scores_from_contingency(statistics["contingency"].to(torch.int64))
    return metrics
