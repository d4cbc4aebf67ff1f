"""The cells of the similarity benchmark: users, one round of gradients, and what every similarity makes of them."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from pa_cfl_users import dealt_by_hand, first_round
from scipy.spatial.distance import pdist, squareform
from scipy.stats import spearmanr
from sklearn.metrics import adjusted_rand_score

from fedclust import Dirichlet, FederatedDataModule, LabelGroups, PrivateAdaptiveCFL
from fedclust.algorithms.pa_cfl_servers import ManagementServer
from fedclust.data.sources import load_source
from fedclust.random import numpy_generator
from lightning_modules.pa_cfl import PrivateAdaptiveClient

OVERLAPS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
GROUPS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
Values = dict[str, Any]


def overlap_data(dataset: str, seed: int, options: argparse.Namespace) -> FederatedDataModule:
    """Figure 11a: U1 has classes 0-4, the user with overlap o has classes 5(1 − o) to 5(1 − o) + 4; no row twice."""
    source = load_source(dataset, root=options.root)
    labels = source.train.y.numpy()
    starts = [0, *(round(5 * (1 - overlap)) for overlap in OVERLAPS)]
    parts: list[list[np.ndarray]] = [[] for _ in starts]
    for label in range(10):
        owners = [user for user, start in enumerate(starts) if start <= label < start + 5]
        rows = numpy_generator(seed, "overlap", label).permutation(np.flatnonzero(labels == label))
        if len(owners) * options.rows_per_label > len(rows):
            raise SystemExit(f"--rows-per-label: class {label} has {len(rows)} rows for {len(owners)} users")
        for place, user in enumerate(owners):
            parts[user].append(rows[place * options.rows_per_label : (place + 1) * options.rows_per_label])
    return dealt_by_hand(source, [np.concatenate(part) for part in parts], seed)


def cluster_data(
    dataset: str, partition: str, users: int, seed: int, options: argparse.Namespace
) -> FederatedDataModule:
    """Set-2 or Dirichlet users of a data set, of its first --limit training rows if that is not 0."""
    source: Any = dataset
    if options.limit:
        loaded = load_source(dataset, root=options.root)
        rows, test = slice(0, options.limit), slice(0, max(10, options.limit // 6))
        assert loaded.test is not None
        source = type(loaded)(loaded.name, loaded.train.select(rows), loaded.test.select(test), loaded.class_names)
    if partition == "set2":
        dealt: Any = LabelGroups(GROUPS, users // len(GROUPS))
    else:
        dealt = Dirichlet(users, options.alpha, min_size=options.min_size)
    return FederatedDataModule(source, dealt, root=options.root, seed=seed)


def described(data: FederatedDataModule, options: argparse.Namespace) -> tuple[ManagementServer, float]:
    """The management server after every user has trained and described itself, and the seconds that took."""
    # A gradient metric has the users reveal their gradients beside their sequences: one round serves every similarity.
    algorithm = PrivateAdaptiveCFL(round_epochs=options.epochs, top_k=options.top_k, similarity="l2", privacy=False)
    client = PrivateAdaptiveClient("cnn", lr=options.lr, batch_size=options.batch_size)
    current = first_round(data, algorithm, client, options.precision, options.threads)
    start = time.perf_counter()
    current.describe()
    return current.ms, time.perf_counter() - start


def measured(ms: ManagementServer, similarity: str, radius: int) -> tuple[np.ndarray, float]:
    """The server's own distances under a similarity, and the seconds that they took."""
    ms.similarity, ms.radius = similarity, radius
    start = time.perf_counter()
    return ms.distances(), time.perf_counter() - start


def overlap_cell(dataset: str, seed: int, names: list[str], options: argparse.Namespace) -> Values:
    """Figure 11a: distances of U1 to the six others by similarity."""
    ms, seconds = described(overlap_data(dataset, seed, options), options)
    found: Values = {"users": len(OVERLAPS) + 1, "train_seconds": round(seconds, 2), "overlaps": OVERLAPS, "by": {}}
    for name in names:
        distances, spent = measured(ms, name, options.radius)
        row = distances[0, 1:]
        found["by"][name] = {
            "distances": row.tolist(),
            "normalised": (row / row.max()).tolist() if row.max() > 0 else row.tolist(),
            "spearman": rank_correlation(OVERLAPS, row),
            "seconds": round(spent, 3),
        }
    return found


def cluster_cell(
    dataset: str, partition: str, users: int, seed: int, names: list[str], options: argparse.Namespace
) -> Values:
    """Pre-clusters by similarity against the planted groups, and distances against the labels' distances."""
    data = cluster_data(dataset, partition, users, seed, options)
    ms, seconds = described(data, options)
    clients = sorted(ms.sequences)
    labels = squareform(label_distances(data, clients))
    pairs = np.triu_indices(len(clients), 1)
    k = len(ms.sequences[clients[0]])
    found: Values = {"users": len(clients), "k": k, "train_seconds": round(seconds, 2), "by": {}}
    for name in names:
        distances, spent = measured(ms, name, options.radius)
        clusters = ms.pre_clusters(distances)
        row: Values = {"clusters": len(clusters.clusters), "dbi": clusters.dbi, "reason": clusters.reason}
        row["spearman"] = rank_correlation(labels[pairs], distances[pairs])
        if data.groups is not None:
            row["ari"] = float(adjusted_rand_score(data.groups[clients], clusters.labels))
        found["by"][name] = {**row, "seconds": round(spent, 3)}
    return found


def label_distances(data: FederatedDataModule, clients: list[int]) -> np.ndarray:
    """Total variation distances of the users' label shares, all pairs in the order of `pdist`."""
    shares = []
    for client in clients:
        counts = np.bincount(data.client(client).train.y.numpy(), minlength=data.n_classes or 0)
        shares.append(counts / counts.sum())
    return pdist(np.stack(shares), "cityblock") / 2


def rank_correlation(one: Any, other: Any) -> float | None:
    """Spearman's coefficient; None where one side is constant."""
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return None
    return float(spearmanr(one, other).statistic)
