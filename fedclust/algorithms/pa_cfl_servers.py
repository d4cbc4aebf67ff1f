"""PA-CFL's two servers: separate objects with separate memories, which meet in explicit messages only (Sec. 4.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.clustering.distances import pairwise
from fedclust.clustering.gradients import GRADIENT_METRICS, gradient_distances
from fedclust.clustering.linkage import linkage_clusters
from fedclust.clustering.spherical import SphericalClusters, cosines, inner_products, reassign, softmax_means
from fedclust.clustering.trees import AdaptiveClusters, adaptive_clusters
from fedclust.federation.message import Message, Value, any_tensors_under, message_bytes, read_number, read_tensor
from fedclust.privacy.clipping import median_norm
from fedclust.privacy.importance import global_ranking
from fedclust.privacy.randomness import RandomSource
from fedclust.privacy.shuffling import shuffle_coordinates

Observer = Callable[[str, str, Message], None]
"""Called with (receiver, sender, message): "ms", "as" or "client 3" for both."""

# A shorter aggregate is the noise of a round in which nobody moved (see `median_norm`), and has no direction.
_SHORTEST = 1e-20


@dataclass
class Router:
    """Hands everyone only what is addressed to it, and counts the bytes of both servers.

    Attributes:
        observer: Told (receiver, sender, message) of every message, for tests and audits.
        received: Server ("ms", "as") → bytes that it received in this round, from users and from the other server.
        sent: Server → bytes that it sent in this round, to users and to the other server.
    """

    observer: Observer | None = None
    received: dict[str, int] = field(default_factory=lambda: {"ms": 0, "as": 0})
    sent: dict[str, int] = field(default_factory=lambda: {"ms": 0, "as": 0})

    def part(self, receiver: str, sender: str, reply: Mapping[str, Value]) -> Message:
        """The entries of a user's reply that start with `receiver/`, without it."""
        start = f"{receiver}/"
        part = {name.removeprefix(start): value for name, value in reply.items() if name.startswith(start)}
        if part:
            self.deliver(receiver, sender, part)
        return part

    def deliver(self, receiver: str, sender: str, message: Message) -> Message:
        """Passes a message on; one of its two ends is a server."""
        size = message_bytes(message)
        for counts, end in ((self.received, receiver), (self.sent, sender)):
            if end in counts:
                counts[end] += size
        if self.observer is not None:
            self.observer(receiver, sender, message)
        return message

    def metrics(self) -> dict[str, float]:
        """`bytes/ms_received`, `bytes/ms_sent`, and the same of `as`."""
        directions = (("received", self.received), ("sent", self.sent))
        return {f"bytes/{end}_{way}": float(size) for way, counts in directions for end, size in counts.items()}


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
        users = sorted(self.sequences)
        return global_ranking([self.sequences[user] for user in users], k, ids=users)

    def distances(self, progress: Callable[[int, int], None] | None = None) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Sec. 5.4: distances (N, N) between the users of this round, in ascending order of their ids.

        Args:
            progress: Called with (pairs done, all pairs) from time to time.

        Raises:
            ValueError: For sequences or gradients that cannot be compared, naming the user.
        """
        users = sorted(self.sequences)
        if self.similarity in GRADIENT_METRICS:
            gradients = torch.stack([self.gradients[user] for user in users])
            return gradient_distances(gradients, self.similarity, ids=users)
        rows = [self.sequences[user].numpy() for user in users]
        return pairwise(rows, self.similarity, radius=self.radius, ids=users, progress=progress)

    def pre_clusters(self, distances: np.ndarray[Any, Any]) -> AdaptiveClusters:
        """Sec. 5.4: clusters of the users of this round."""
        return adaptive_clusters(distances, sorted(self.sequences))

    def bound(self) -> float:
        """Φ: the median of the users' norms of this round, see `median_norm` where it is 0."""
        return median_norm(self.norms)

    def shuffled(self, groups: Mapping[int, int], source: RandomSource) -> tuple[dict[int, Tensor], list[int]]:
        """Sec. 5.5: the less important values, shuffled inside groups; and the users that are alone in theirs."""
        clients = sorted(self.less)
        labels = np.array([groups[client] for client in clients])
        mixed, alone = shuffle_coordinates(_stacked(self.less, clients), labels, source)
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
        return sorted(self.sizes)

    def vectors(self) -> Tensor:
        """Sec. 5.6: the reconstructed gradients (N, d), users in ascending order; the parts are given up."""
        users = self.clients
        first, important = self.important[users[0]], len(self.important[users[0]])
        found = first.new_empty(len(users), important + len(self.less[users[0]]))
        for row, user in enumerate(users):
            found[row, :important], found[row, important:] = self.important.pop(user), self.less.pop(user)
        return found

    def clusters(self, vectors: Tensor, refine: bool) -> SphericalClusters:
        """Sec. 5.6: refined clusters, or the pre-clusters as they are.

        Without pre-clusters, refinement starts from average linkage on cosine distances, its number by silhouette.
        """
        products = inner_products(vectors)
        if self.groups is None:
            distances = (1 - cosines(products)).clamp(min=0).fill_diagonal_(0)
            labels = torch.from_numpy(linkage_clusters(distances.numpy()))
        else:
            labels = torch.tensor([self.groups[user] for user in self.clients])
        return reassign(products, labels, self._weights(), self.max_iter if refine else 0)

    def known_clusters(self, vectors: Tensor, known: Mapping[int, int]) -> tuple[SphericalClusters, list[int]]:
        """The clusters that the users are in already, and their numbers: the label 0 stands for the first of these."""
        numbers = sorted({known[user] for user in self.clients})
        labels = torch.tensor([numbers.index(known[user]) for user in self.clients])
        return reassign(inner_products(vectors), labels, self._weights(), 0), numbers

    def aggregates(self, vectors: Tensor, clusters: SphericalClusters) -> Tensor:
        """Sec. 5.7: one aggregate per cluster (K, d)."""
        return softmax_means(vectors, clusters)

    @staticmethod
    def global_step(aggregates: Tensor, labels: Tensor, kind: str) -> Tensor:
        """Sec. 5.7: the global aggregate G (d,), of unit vectors; "mean_norm" gives it the clusters' mean norm.

        An aggregate of (nearly) no length has no direction and adds nothing.
        """
        share = torch.bincount(labels).double() / len(labels)
        norms = torch.linalg.vector_norm(aggregates, dim=1, dtype=torch.float64)
        moved = norms > _SHORTEST
        factors = torch.where(moved, share / norms.where(moved, 1.0), 0.0)
        step = factors.to(aggregates) @ aggregates
        if kind == "mean_norm":
            length = step.norm()
            return step / length * norms.mean() if float(length) > 0 else step
        return step

    def _weights(self) -> Tensor:
        return torch.tensor([self.sizes[user] for user in self.clients], dtype=torch.float64)


def _stacked(parts: dict[int, Tensor], users: list[int]) -> Tensor:
    """The users' vectors as rows (N, d); each is given up once it is copied, so that memory holds them once."""
    first = parts[users[0]]
    found = first.new_empty(len(users), len(first))
    for row, user in enumerate(users):
        found[row] = parts.pop(user)
    return found
