"""What methods with one clustering for all clients share: evaluation from sums, and assignments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor

from fedclust.clustering.statistics import DISPERSION, add_statistics, cluster_means, metrics_from_statistics
from fedclust.federation.algorithm import Algorithm, Metrics, Server, State
from fedclust.federation.client import ClientModule
from fedclust.federation.context import WorkContext
from fedclust.federation.message import Message, Value, read_number, read_tensor

Replies = Mapping[int, Message]


class DeepClusteringModule(Protocol):
    """What FedDCN needs of the server's own module; `lightning_modules.DCN` has it."""

    n_clusters: int
    latent_dim: int

    def load_decoder(self, tensors: dict[str, Tensor]) -> None:
        """Takes a client's decoder."""

    def decode_rows(self, z: Tensor) -> Tensor:
        """Latents → rows."""

    def learn_from(self, message: Mapping[str, Value], ctx: WorkContext, x: Tensor, target: Tensor | None) -> Tensor:
        """Algorithm 1 on rows of the server's own; returns the centres."""


def deep_clustering(module: ClientModule) -> DeepClusteringModule:
    """The module as one that can deep-cluster.

    Raises:
        TypeError: If it lacks something; names it.
    """
    needed = ("n_clusters", "latent_dim", "load_decoder", "decode_rows", "learn_from")
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        kind = type(module).__name__
        raise TypeError(f"this method needs a client module such as lightning_modules.DCN; {kind} lacks {missing}")
    return cast(DeepClusteringModule, module)


class ClusteringAlgorithm(Algorithm):
    """Asks clients for sums over their rows ("evaluate", "disperse") and for their clusters ("assign")."""

    @abstractmethod
    def model_message(self, state: State) -> Message:
        """What a client needs to assign its rows: weights, centres."""

    def metric_names(self, labels: bool) -> frozenset[str]:
        """What `evaluate` gives on validation rows."""
        names = {"recon", "dbi", "silhouette", "silhouette_input", "populated", "latent_variance", "collapsed"}
        return frozenset(f"val/{name}" for name in names | (self.label_metrics if labels else set()))

    def evaluate(self, state: State, server: Server, split: str) -> Metrics:
        """Metrics over all clients' rows of one split, from sums that the clients send."""
        shared: Message = {**self.model_message(state), "split": split}
        replies: Replies = server.ask("evaluate", server.clients, shared=shared)
        statistics, dispersion = self._dispersion(replies, shared, server)
        for client, reply in replies.items():
            rows = read_number(reply, "n")
            if rows:
                values = {f"{split}_rows": rows, f"{split}_recon": float(read_tensor(reply, "recon_sum")) / rows}
                server.client_values.setdefault(client, {}).update(values)
        metrics = metrics_from_statistics(statistics, dispersion)
        if metrics["collapsed"]:
            server.note(f"collapsed: on {split}, round {server.context.round}, the clustering is degenerate")
        return metrics

    def assign(self, state: State, server: Server, client: int, split: str) -> Message:
        """Cluster of every row of one client's split, and its distance to the centre."""
        shared: Message = {**self.model_message(state), "split": split}
        return server.ask("assign", [client], shared=shared)[client]

    def _dispersion(
        self, replies: Replies, shared: Message, server: Server
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Sums over rows, without and with their means; who fails between the two trips counts in none of them."""
        while True:
            statistics = add_statistics([cast("dict[str, Tensor]", reply) for reply in replies.values()])
            means = cluster_means(statistics)
            asked: Message = {**shared, "means": means, "counts": statistics["counts"]}
            answers = server.ask("disperse", sorted(replies), shared=asked)
            if answers.keys() == replies.keys():
                return statistics, {
                    name: torch.stack([read_tensor(reply, name) for reply in answers.values()]).sum(0)
                    for name in DISPERSION
                    if name == DISPERSION[0] or all(name in reply for reply in answers.values())
                }
            replies = {client: replies[client] for client in answers}
