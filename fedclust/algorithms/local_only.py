"""LocalOnly: every client trains by itself; the baseline that shows what collaboration is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedclust.algorithms.supervised import SupervisedAlgorithm
from fedclust.checks import positive_int
from fedclust.federation.algorithm import Metrics, Server, State
from fedclust.federation.averaging import TermMeans
from fedclust.federation.client import ClientModule
from fedclust.federation.message import Message, read_number, with_prefix


@dataclass
class LocalOnlyState(State):
    """The weights that every client starts from; what it makes of them stays with it."""

    initial: dict[str, Tensor]


class LocalOnly(SupervisedAlgorithm):
    """No exchange after the initial weights: local epochs of every client on its own model.

    Args:
        round_epochs: Local epochs per round.
    """

    state_class: ClassVar[type[State]] = LocalOnlyState
    evaluate_action: ClassVar[str] = "evaluate_own"
    assign_action: ClassVar[str] = "assign_own"

    def __init__(self, round_epochs: int = 1) -> None:
        self.round_epochs = positive_int("round_epochs", round_epochs)

    def start(self, server: Server) -> LocalOnlyState:
        """The initial weights."""
        return LocalOnlyState(server.module.snapshot())

    def round(self, state: State, cohort: list[int], server: Server) -> tuple[LocalOnlyState, Metrics]:
        """Local epochs of the cohort."""
        assert isinstance(state, LocalOnlyState)
        terms = TermMeans()
        shared: Message = {**self.shared_model(state), "epochs": 1 if server.quick else self.round_epochs}

        def take(client: int, reply: Message) -> None:
            terms.add(reply, read_number(reply, "n_rows"))

        with server.stage("train"):
            server.ask("update_own", cohort, shared=shared, on_reply=take)
        return state, terms.metrics()

    def shared_model(self, state: State) -> Message:
        """The initial weights, for clients that have not trained yet."""
        assert isinstance(state, LocalOnlyState)
        return {**with_prefix("weights", state.initial)}

    def own_model(self, state: State, client: int) -> Message:
        """Nothing: a client keeps its model."""
        return {}

    @classmethod
    def module_for(cls, state: State, module: ClientModule) -> ClientModule:
        """The initial model: clients' models never reach the server."""
        assert isinstance(state, LocalOnlyState)
        module.load_exchanged(state.initial)
        return module
