"""What all supervised methods share: a model per client, evaluated on the client's own rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, cast

from torch import Tensor

from fedclust.federation.algorithm import Algorithm, Metrics, Server, State
from fedclust.federation.client import ClientModule
from fedclust.federation.message import Message, Value, read_number, read_tensor, with_prefix
from fedclust.scores import accuracy, macro_f1, user_metrics


class SupervisedAlgorithm(Algorithm):
    """Evaluates every client with the model that is its own.

    Attributes:
        evaluate_action: Action that evaluates a split.
        assign_action: Action that predicts a split.
    """

    default_monitor: ClassVar[tuple[str, str]] = ("val/acc_mean", "max")
    label_metrics: ClassVar[frozenset[str]] = frozenset(
        {"acc_mean", "acc_worst", "acc_pooled", "f1_macro", "f1_worst", "auc", "auc_worst"}
    )
    evaluate_action: ClassVar[str] = "evaluate"
    assign_action: ClassVar[str] = "assign"

    @abstractmethod
    def shared_model(self, state: State) -> Message:
        """The part of the model message that is the same for all clients."""

    def own_models(self, state: State, clients: Sequence[int]) -> dict[int, Message]:
        """Each client's part of the model message; empty where the model is one for all or stays with the client."""
        return {client: {} for client in clients}

    def metric_names(self, labels: bool) -> frozenset[str]:
        """What `evaluate` gives on validation rows, and the training loss."""
        return frozenset(f"val/{name}" for name in self.label_metrics) | {"train/loss"}

    def evaluate(self, state: State, server: Server, split: str) -> Metrics:
        """Accuracy, macro-F1 and area under the ROC over the clients' rows of one split: means, worst, per client."""
        shared: dict[str, Value] = {**self.shared_model(state), "split": split}
        to = self.own_models(state, server.clients)
        confusions: list[Tensor] = []
        areas: list[float | None] = []

        def collect(client: int, reply: Message) -> None:
            confusion = read_tensor(reply, "confusion")
            confusions.append(confusion)
            area = None if reply["auc"] is None else read_number(reply, "auc")
            areas.append(area)
            if int(confusion.sum()):
                found = {"rows": float(confusion.sum()), "acc": accuracy(confusion), "f1": macro_f1(confusion)}
                found |= {} if area is None else {"auc": area}
                values = server.client_values.setdefault(client, {})
                values |= {f"{split}_{name}": value for name, value in found.items()}

        server.ask(self.evaluate_action, to, shared=shared, on_reply=collect)
        return user_metrics(confusions, areas)

    def assign(self, state: State, server: Server, client: int, split: str) -> Message:
        """Predicted class of every row of one client's split."""
        shared: dict[str, Value] = {**self.shared_model(state), "split": split}
        return server.ask(self.assign_action, self.own_models(state, [client]), shared=shared)[client]


class KeepsOwnModel(Protocol):
    """A client module that keeps a model of the client's own; `lightning_modules.Classifier` does."""

    def load_own(self, message: Mapping[str, Value], state: Mapping[str, Value]) -> None:
        """Loads the client's own model from its state, or the initial weights of the message if it has none yet."""


@dataclass
class OwnModelState(State):
    """What the server knows where every client keeps a model of its own.

    Attributes:
        initial: The weights that every client starts from.
    """

    initial: dict[str, Tensor]


class OwnModelAlgorithm(SupervisedAlgorithm):
    """Every client keeps a model of its own, which starts from the initial weights and never reaches a server."""

    state_class: ClassVar[type[State]] = OwnModelState
    personal: ClassVar[bool] = True
    evaluate_action: ClassVar[str] = "evaluate_own"
    assign_action: ClassVar[str] = "assign_own"

    def shared_model(self, state: State) -> Message:
        """The initial weights, for clients that have not taken part yet."""
        return _initial(state)

    @classmethod
    def module_for(cls, state: State, module: ClientModule) -> ClientModule:
        """The initial model: the state holds no other."""
        assert isinstance(state, OwnModelState)
        module.load_exchanged(state.initial)
        return module

    @classmethod
    def module_for_client(
        cls, state: State, module: ClientModule, client: int, own: Mapping[str, Value]
    ) -> ClientModule:
        """The client's own model, out of its own state."""
        cast(KeepsOwnModel, module).load_own(_initial(state), own)
        return module


def _initial(state: State) -> Message:
    assert isinstance(state, OwnModelState)
    return {**with_prefix("weights", state.initial)}
