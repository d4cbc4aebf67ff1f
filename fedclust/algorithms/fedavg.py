"""FedAvg (McMahan et al. 2017): the plain baseline with one model for all clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedclust.algorithms.supervised import SupervisedAlgorithm
from fedclust.checks import positive_int
from fedclust.federation.algorithm import Metrics, Server, State
from fedclust.federation.averaging import TermMeans, WeightedAverage
from fedclust.federation.client import ClientModule
from fedclust.federation.message import Message, read_number, tensors_under, with_prefix


@dataclass
class FedAvgState(State):
    """The global model's exchanged tensors."""

    weights: dict[str, Tensor]


class FedAvg(SupervisedAlgorithm):
    """One global model: local epochs from its weights, then their average by number of rows.

    Args:
        round_epochs: Local epochs per round.
    """

    state_class: ClassVar[type[State]] = FedAvgState

    def __init__(self, round_epochs: int = 1) -> None:
        self.round_epochs = positive_int("round_epochs", round_epochs)

    def start(self, server: Server) -> FedAvgState:
        """The initial weights."""
        return FedAvgState(server.module.snapshot())

    def round(self, state: State, cohort: list[int], server: Server) -> tuple[FedAvgState, Metrics]:
        """Local epochs of the cohort, then the average."""
        assert isinstance(state, FedAvgState)
        average, terms = WeightedAverage(), TermMeans()

        def fold(client: int, reply: Message) -> None:
            rows = read_number(reply, "n_rows")
            average.add(tensors_under("weights", reply), rows, name=f"client {client}")
            terms.add(reply, rows)

        shared: Message = {**with_prefix("weights", state.weights), "epochs": 1 if server.quick else self.round_epochs}
        with server.stage("train"):
            server.ask("update", cohort, shared=shared, on_reply=fold)
        return FedAvgState(average.result()), terms.metrics()

    def shared_model(self, state: State) -> Message:
        """The global weights."""
        assert isinstance(state, FedAvgState)
        return {**with_prefix("weights", state.weights)}

    @classmethod
    def module_for(cls, state: State, module: ClientModule) -> ClientModule:
        """The global model."""
        assert isinstance(state, FedAvgState)
        module.load_exchanged(state.weights)
        return module
