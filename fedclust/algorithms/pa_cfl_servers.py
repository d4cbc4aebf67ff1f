"""PA-CFL's two servers: separate objects with separate memories, which meet in explicit messages only (Sec. 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.clustering.distances import pairwise
from fedclust.clustering.gradients import gradient_distances
from fedclust.clustering.linkage import linkage_clusters
from fedclust.clustering.spherical import SphericalClusters, cosine, reassign, softmax_means, weighted_means
from fedclust.clustering.trees import AdaptiveClusters, adaptive_clusters
from fedclust.federation.message import Message, Value, any_tensors_under, message_bytes, read_number, read_tensor
from fedclust.privacy.clipping import median_norm
from fedclust.privacy.importance import global_ranking
from fedclust.privacy.randomness import RandomSource
from fedclust.privacy.shuffling import shuffle_coordinates

SEQUENCE_METRICS = ("dtw", "fastdtw", "index_overlap", "rank_overlap")
GRADIENT_METRICS = ("l2", "l1", "cosine", "pearson", "max_norm", "mahalanobis")
Observer = Callable[[str, str, Message], None]


@dataclass
class Router:
    """Hands every server only what is addressed to it, and counts the bytes.

    Attributes:
        observer: Told (receiver, sender, message) of every message, for tests and audits.
        received: Receiver ("ms", "as") → bytes so far in this round.
    """

    observer: Observer | None = None
    received: dict[str, int] = field(default_factory=lambda: {"ms": 0, "as": 0})

    def part(self, receiver: str, sender: str, reply: Mapping[str, Value]) -> Message:
        """The entries of a reply that start with `receiver/`, without it."""
        start = f"{receiver}/"
        part = {name.removeprefix(start): value for name, value in reply.items() if name.startswith(start)}
        if part:
            self.deliver(receiver, sender, part)
        return part

    def deliver(self, receiver: str, sender: str, message: Message) -> Message:
        """Passes one server's message to the other."""
        self.received[receiver] += message_bytes(message)
        if self.observer is not None:
            self.observer(receiver, sender, message)
        return message


class ManagementServer:
    """Sees sequences, norms and randomised less important values; never a value of an important coordinate.

    Args:
        similarity: How sequences (or, for comparisons, gradients) are compared.
        radius: Radius of FastDTW.
    """

    def __init__(self, similarity: str, radius: int) -> None:
        self.similarity, self.radius = similarity, radius
        self.sequences: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.norms: dict[int, float] = {}
        self.less: dict[int, Tensor] = {}

    def receive(self, client: int, message: Message) -> None:
        """Takes one user's message of any phase."""
        if "sequence" in message:
            self.sequences[client] = read_tensor(message, "sequence")
        if "gradient" in message:
            self.gradients[client] = read_tensor(message, "gradient")
        if "norm" in message:
            self.norms[client] = read_number(message, "norm")
        if "less" in message:
            self.less[client] = read_tensor(message, "less")

    def ranking(self, k: int) -> Tensor:
        """Sec. 5.3: the global permutation sequence π^g (k,)."""
        return global_ranking([self.sequences[client] for client in sorted(self.sequences)], k)

    def distances(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Sec. 5.4: distances between the users of this round, in ascending order of their ids."""
        clients = sorted(self.sequences)
        if self.similarity in GRADIENT_METRICS:
            return gradient_distances(torch.stack([self.gradients[client] for client in clients]), self.similarity)
        rows = [self.sequences[client].numpy() for client in clients]
        return pairwise(rows, self.similarity, radius=self.radius)

    def pre_clusters(self, distances: np.ndarray[Any, Any]) -> AdaptiveClusters:
        """Sec. 5.4: clusters of the users of this round."""
        return adaptive_clusters(distances, sorted(self.sequences))

    def bound(self) -> float:
        """Φ: the median of the users' norms of this round, see `median_norm` where it is 0."""
        return median_norm(self.norms)

    def shuffled(self, groups: Mapping[int, int], source: RandomSource) -> tuple[dict[int, Tensor], list[int]]:
        """Sec. 5.5: the less important values, shuffled inside groups; and the users that are alone in theirs."""
        clients = sorted(self.less)
        matrix = torch.stack([self.less[client] for client in clients])
        labels = np.array([groups[client] for client in clients])
        mixed, alone = shuffle_coordinates(matrix, labels, source)
        self.less = {}
        return dict(zip(clients, mixed, strict=True)), [clients[row] for row in alone]


class AggregationServer:
    """Sees important values in the order of π^g and shuffled other values; never π^g nor which coordinate is which.

    Args:
        max_iter: Cap on the reassignments of fine clustering.
    """

    def __init__(self, max_iter: int) -> None:
        self.max_iter = max_iter
        self.important: dict[int, Tensor] = {}
        self.less: dict[int, Tensor] = {}
        self.sizes: dict[int, float] = {}
        self.buffers: dict[int, dict[str, Tensor]] = {}
        self.groups: dict[int, int] | None = None

    def receive(self, client: int, message: Message) -> None:
        """Takes one user's message."""
        self.important[client] = read_tensor(message, "important")
        self.sizes[client] = read_number(message, "n_rows")
        self.buffers[client] = any_tensors_under("buffers", message)
        if "less" in message:
            self.less[client] = read_tensor(message, "less")

    def receive_shuffled(self, message: Message) -> None:
        """Takes the management server's message: shuffled values per user, and the pre-clusters where it has them."""
        for name in message:
            kind, _, client = name.partition("/")
            if kind == "less":
                self.less[int(client)] = read_tensor(message, name)
        if "clients" in message:
            clients, groups = read_tensor(message, "clients"), read_tensor(message, "groups")
            self.groups = dict(zip(clients.tolist(), groups.tolist(), strict=True))

    @property
    def clients(self) -> list[int]:
        """Users of this round, ascending."""
        return sorted(self.important)

    def vectors(self) -> Tensor:
        """Sec. 5.6: the reconstructed gradients (N, d), users in ascending order."""
        return torch.stack([torch.cat([self.important[client], self.less[client]]) for client in self.clients])

    def clusters(self, vectors: Tensor, refine: bool) -> SphericalClusters:
        """Sec. 5.6: refined clusters, or the pre-clusters as they are.

        Without pre-clusters, refinement starts from average linkage on cosine distances, its number by silhouette.
        """
        weights = torch.tensor([self.sizes[client] for client in self.clients], dtype=vectors.dtype)
        if self.groups is None:
            distances = (1 - cosine(vectors, vectors)).clamp(min=0).double().fill_diagonal_(0)
            labels = torch.from_numpy(linkage_clusters(((distances + distances.T) / 2).numpy()))
        else:
            labels = torch.tensor([self.groups[client] for client in self.clients])
        if refine:
            return reassign(vectors, labels, weights, self.max_iter)
        labels = torch.unique(labels, return_inverse=True)[1]
        return SphericalClusters(labels, weighted_means(vectors, labels, weights), 0, True)

    def aggregates(self, vectors: Tensor, clusters: SphericalClusters) -> Tensor:
        """Sec. 5.7: one aggregate per cluster (K, d)."""
        return softmax_means(vectors, clusters.labels, clusters.centroids)

    @staticmethod
    def global_step(aggregates: Tensor, labels: Tensor, kind: str) -> Tensor:
        """Sec. 5.7: the global aggregate G (d,), of unit vectors; "mean_norm" gives it the clusters' mean norm."""
        share = torch.bincount(labels).to(aggregates.dtype) / len(labels)
        norms = aggregates.norm(dim=1)
        units = aggregates / norms.clamp(min=torch.finfo(aggregates.dtype).tiny).unsqueeze(1)
        step = share @ units
        if kind == "mean_norm":
            length = step.norm()
            return step / length * norms.mean() if float(length) > 0 else step
        return step
