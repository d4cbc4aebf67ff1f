"""FedAvg (McMahan et al. 2017): the plain baseline with one model for all clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclust.algorithms.summing import require_two_clients, sum_over_clients
from fedclust.algorithms.supervised import SupervisedAlgorithm
from fedclust.checks import choice, positive, positive_int
from fedclust.federation.algorithm import Metrics, Server, State
from fedclust.federation.averaging import TermMeans, WeightedAverage
from fedclust.federation.client import ClientModule
from fedclust.federation.message import Message, read_number, tensors_under, with_prefix
from fedclust.privacy.aggregation import NoSum
from fedclust.privacy.sums import MODES, make_aggregation


@dataclass
class FedAvgState(State):
    """The global model's exchanged tensors."""

    weights: dict[str, Tensor]


class FedAvg(SupervisedAlgorithm):
    """One global model: local epochs from its weights, then their average by number of rows.

    Args:
        round_epochs: Local epochs per round.
        aggregation: "plain": the server gets each client's weights. "secure_sum" and "ckks": it gets their sum only,
            weighted by rows; integers among the weights are then averaged and rounded. See `fedclust.privacy.sums`.
        sum_bound: Largest absolute value of rows times weight in a protected sum; a client beyond it is refused.

    Raises:
        ValueError: Naming the argument, its value and what is allowed.
    """

    client_actions: ClassVar[tuple[str, ...]] = ("update", "evaluate")
    client_class: ClassVar[str] = "lightning_modules.Classifier"
    state_class: ClassVar[type[State]] = FedAvgState

    def __init__(
        self,
        round_epochs: int = 1,
        aggregation: Literal["plain", "secure_sum", "ckks"] = "plain",
        sum_bound: float = 1e6,
    ) -> None:
        self.round_epochs = positive_int("round_epochs", round_epochs)
        self.aggregation = make_aggregation(choice("aggregation", aggregation, MODES))
        self.protected = aggregation != "plain"
        self.sum_bound = positive("sum_bound", sum_bound)
        if self.protected and not 2.0**-900 <= self.sum_bound <= 2.0**900:
            raise ValueError(f"sum_bound must lie between 2**-900 and 2**900, got {sum_bound!r}")

    def check(self, server: Server) -> None:
        """Refuses protected sums that cannot work with these clients."""
        if not self.protected:
            return
        require_two_clients(server)
        largest = max(server.clients, key=lambda client: server.sizes[client])
        if self.sum_bound < server.sizes[largest]:
            raise ValueError(
                f"sum_bound must be at least the number of rows of every client, got {self.sum_bound:g} and "
                f"{server.sizes[largest]} rows of client {largest}"
            )

    def start(self, server: Server) -> FedAvgState:
        """The initial weights."""
        return FedAvgState(server.module.snapshot())

    def round(self, state: State, cohort: list[int], server: Server) -> tuple[FedAvgState, Metrics]:
        """Local epochs of the cohort, then the average."""
        assert isinstance(state, FedAvgState)
        if self.protected:
            return self._protected_round(state, cohort, server)
        average, terms = WeightedAverage(), TermMeans()

        def fold(client: int, reply: Message) -> None:
            rows = read_number(reply, "n_rows")
            average.add(tensors_under("weights", reply), rows, name=f"client {client}")
            terms.add(reply, rows)

        with server.stage("train"):
            server.ask("update", cohort, shared=self._work(state, server), on_reply=fold)
        return FedAvgState(average.result()), terms.metrics()

    def _protected_round(self, state: FedAvgState, cohort: list[int], server: Server) -> tuple[FedAvgState, Metrics]:
        """Clients keep what they trained, and only its sum becomes known; who drops out is in neither sum nor count."""
        terms, trained = TermMeans(), []

        def take(client: int, reply: Message) -> None:
            terms.add(reply, read_number(reply, "n_rows"))
            trained.append(client)

        with server.stage("train"):
            server.ask("update_kept", cohort, shared=self._work(state, server), on_reply=take)
        length = sum(value.numel() for value in state.weights.values()) + 1
        with server.stage("sum"):
            to: dict[int, Message] = {client: {} for client in trained}
            try:
                found = sum_over_clients(server, self.aggregation, to, length, self.sum_bound, "contribute_weights")
            except NoSum as error:
                server.note(f"round {server.context.round}: the model stays as it was: {error}")
                return state, terms.metrics()
        means = torch.from_numpy(found.total[:-1] / round(found.total[-1]))
        return FedAvgState(_unflattened(means, state.weights)), terms.metrics()

    def _work(self, state: FedAvgState, server: Server) -> Message:
        """What every client of a round gets: the global weights, and how many epochs to train."""
        return {**self.shared_model(state), "epochs": 1 if server.quick else self.round_epochs}

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


def _unflattened(values: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the shapes and types of `like`, in its order."""
    found, start = {}, 0
    for name, tensor in like.items():
        part = values[start : start + tensor.numel()].reshape(tensor.shape)
        found[name] = (part if tensor.is_floating_point() else part.round()).to(tensor.dtype)
        start += tensor.numel()
    return found
