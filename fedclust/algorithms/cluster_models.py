"""What methods with one model per cluster of clients share: FedAvg inside each cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedclust.algorithms.supervised import SupervisedAlgorithm
from fedclust.checks import positive_int
from fedclust.federation.algorithm import Metrics, Server, State
from fedclust.federation.averaging import TermMeans, WeightedAverage
from fedclust.federation.client import ClientModule
from fedclust.federation.message import Message, Value, read_number, tensors_under, with_prefix

Models = dict[str, Tensor]


@dataclass
class ClusterModelState(State):
    """Models and who uses which.

    Attributes:
        models: Name → (K, *shape), the exchanged tensors of every cluster's model.
        initial: The weights that all of them started from; clients without a cluster use them.
        clusters: (N,) int64 cluster of each client; −1 for a client that has none.
    """

    models: Models
    initial: Models
    clusters: Tensor


class ClusterModelAlgorithm(SupervisedAlgorithm):
    """One model per cluster, trained by the cluster's clients.

    Args:
        round_epochs: Local epochs per round; 0 groups clients without training.
    """

    personal: ClassVar[bool] = True

    def __init__(self, round_epochs: int = 1) -> None:
        self.round_epochs = positive_int("round_epochs", round_epochs, least=0)

    def train(self, state: State, cohort: Sequence[int], server: Server) -> tuple[Models, Metrics]:
        """Local epochs of the cohort from their clusters' models, then the average inside each cluster.

        Clients without a cluster do not train; clusters of which nobody took part keep their model.
        """
        assert isinstance(state, ClusterModelState)
        members = [client for client in cohort if int(state.clusters[client]) >= 0]
        if self.round_epochs == 0 or not members:
            return state.models, {}
        averages: dict[int, WeightedAverage] = {}
        terms = TermMeans()

        def fold(client: int, reply: Message) -> None:
            rows = read_number(reply, "n_rows")
            average = averages.setdefault(int(state.clusters[client]), WeightedAverage())
            average.add(tensors_under("weights", reply), rows, name=f"client {client}")
            terms.add(reply, rows)

        epochs = 1 if server.quick else self.round_epochs
        with server.stage("train"):
            server.ask("update", self.own_models(state, members), shared={"epochs": epochs}, on_reply=fold)
        models = {name: values.clone() for name, values in state.models.items()}
        for cluster, average in averages.items():
            for name, value in average.result().items():
                models[name][cluster] = value
        return models, terms.metrics()

    def evaluate(self, state: State, server: Server, split: str) -> Metrics:
        """Metrics of every client with its cluster's model; at the end clients without one are named."""
        assert isinstance(state, ClusterModelState)
        nowhere = [client for client in server.clients if int(state.clusters[client]) < 0]
        if nowhere and split == "test":
            server.note(f"clients {nowhere} have no group, so they are tested, and predict, with the initial weights")
        return super().evaluate(state, server, split)

    def shared_model(self, state: State) -> Message:
        """Nothing: no model is the same for all."""
        return {}

    def own_models(self, state: State, clients: Sequence[int]) -> dict[int, Message]:
        """Each client's model is its cluster's."""
        assert isinstance(state, ClusterModelState)
        clusters = {client: int(state.clusters[client]) for client in clients}
        # One message per cluster, not per client: its tensors are then fingerprinted once.
        messages = {cluster: with_prefix("weights", _model(state, cluster)) for cluster in set(clusters.values())}
        return {client: {**messages[cluster]} for client, cluster in clusters.items()}

    # -- after the run --------------------------------------------------------------------------------------------

    @classmethod
    def module_for(cls, state: State, module: ClientModule) -> ClientModule:
        """The first cluster's model; there is none for all."""
        return cls.module_for_cluster(state, module, 0)

    @classmethod
    def module_for_client(
        cls, state: State, module: ClientModule, client: int, own: Mapping[str, Value]
    ) -> ClientModule:
        """The model of the client's cluster."""
        assert isinstance(state, ClusterModelState)
        module.load_exchanged(_model(state, int(state.clusters[client])))
        return module

    @classmethod
    def module_for_cluster(cls, state: State, module: ClientModule, cluster: int) -> ClientModule:
        """The model of one cluster."""
        assert isinstance(state, ClusterModelState)
        count = len(next(iter(state.models.values())))
        if not 0 <= cluster < count:
            raise ValueError(f"there is no cluster {cluster!r}; clusters are 0..{count - 1}")
        module.load_exchanged(_model(state, cluster))
        return module

    @classmethod
    def assignments(cls, state: State) -> dict[int, int]:
        """Client → cluster, for the clients that have one."""
        assert isinstance(state, ClusterModelState)
        return {client: cluster for client, cluster in enumerate(state.clusters.tolist()) if cluster >= 0}


def repeated(weights: Models, count: int) -> Models:
    """The same model for each of ``count`` clusters."""
    return {name: torch.stack([value] * count) for name, value in weights.items()}


def _model(state: ClusterModelState, cluster: int) -> Models:
    if cluster < 0:
        return state.initial
    return {name: values[cluster] for name, values in state.models.items()}
