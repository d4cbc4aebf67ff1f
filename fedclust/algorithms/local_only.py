"""LocalOnly: every client trains by itself; the baseline that shows what collaboration is worth."""

from __future__ import annotations

from typing import ClassVar

from fedclust.algorithms.supervised import OwnModelAlgorithm, OwnModelState
from fedclust.checks import positive_int
from fedclust.federation.algorithm import Metrics, Server, State
from fedclust.federation.averaging import TermMeans
from fedclust.federation.message import Message, read_number


class LocalOnly(OwnModelAlgorithm):
    """No exchange after the initial weights: local epochs of every client on its own model.

    Args:
        round_epochs: Local epochs per round.
    """

    client_actions: ClassVar[tuple[str, ...]] = ("update_own",)
    client_class: ClassVar[str] = "lightning_modules.Classifier"

    def __init__(self, round_epochs: int = 1) -> None:
        self.round_epochs = positive_int("round_epochs", round_epochs)

    def start(self, server: Server) -> OwnModelState:
        """The initial weights."""
        return OwnModelState(server.module.snapshot())

    def round(self, state: State, cohort: list[int], server: Server) -> tuple[State, Metrics]:
        """Local epochs of the cohort."""
        terms = TermMeans()
        shared: Message = {**self.shared_model(state), "epochs": 1 if server.quick else self.round_epochs}

        def take(client: int, reply: Message) -> None:
            terms.add(reply, read_number(reply, "n_rows"))

        with server.stage("train"):
            server.ask("update_own", cohort, shared=shared, on_reply=take)
        return state, terms.metrics()
