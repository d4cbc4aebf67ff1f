"""What methods that group clients share: figures on the groups, and where a new client belongs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean

from sklearn.metrics import adjusted_rand_score

from fedclust.federation.algorithm import Metrics, Server


def group_metrics(server: Server, clusters: Mapping[int, int]) -> Metrics:
    """Number of clusters, and the adjusted Rand index against planted groups where the data knows them.

    Args:
        server: Knows the planted groups.
        clusters: Client id → cluster.
    """
    metrics: Metrics = {"clusters/final": float(len(set(clusters.values())))}
    if server.planted is not None and clusters:
        truth = [server.planted[client] for client in clusters]
        metrics["clients/ari"] = float(adjusted_rand_score(truth, list(clusters.values())))
    return metrics


def nearest_cluster(clusters: Iterable[int], distances: Iterable[float]) -> int:
    """The cluster whose members are nearest on average; ties go to the lower one.

    Args:
        clusters: Cluster of each member.
        distances: Distance of the new client to each of them, in the same order.
    """
    of: dict[int, list[float]] = {}
    for cluster, distance in zip(clusters, distances, strict=True):
        of.setdefault(cluster, []).append(float(distance))
    return min(sorted(of), key=lambda cluster: mean(of[cluster]))
