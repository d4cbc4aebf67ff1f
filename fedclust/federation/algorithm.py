"""The server side of a method: a small class over a state, and the server that it works with."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import ClassVar, Self

import torch

from fedclust.federation.backend import Backend, OnReply
from fedclust.federation.client import ClientModule
from fedclust.federation.context import ClientContext, WorkContext
from fedclust.federation.errors import RoundFailedError
from fedclust.federation.message import Message, Value, tensors_under, with_prefix

Metrics = dict[str, float]
_log = logging.getLogger("fedclust")


@dataclass
class State:
    """What an algorithm knows between rounds: a dataclass of tensors, dicts of tensors and plain values."""

    def to_flat(self) -> Message:
        """A flat mapping; a dict field becomes entries `field/name`."""
        flat: Message = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            flat.update(with_prefix(entry.name, value) if isinstance(value, dict) else {entry.name: value})
        return flat

    @classmethod
    def from_flat(cls, flat: Mapping[str, Value]) -> Self:
        """Reads what `to_flat` gave.

        Raises:
            KeyError: If a field is missing.
        """
        values = {}
        for entry in fields(cls):
            values[entry.name] = flat[entry.name] if entry.name in flat else tensors_under(entry.name, flat)
        return cls(**values)


@dataclass
class Server:
    """What an algorithm may use.

    Attributes:
        backend: Carries the messages.
        module: A module of the server's own, of the clients' class.
        clients: Ids of the clients that hold training rows, ascending.
        sizes: Client id → number of training rows.
        input_shape: Shape of one row.
        n_classes: Number of classes, None without labels.
        context: Seed, round, device and precision of work on the server.
        cohort_size: Number of clients in a round.
        quick: A trial run (`fast_dev_run`): long preparations are cut to one epoch.
        seconds: Stage → seconds spent.
        notes: Sentences that belong into the result, each once.
        client_values: Client id → values for the table of clients.
        planted: Client id → planted group, where the data's partition or transform knows it.
        progress: Told what the server is doing, for a progress display.
    """

    backend: Backend
    module: ClientModule
    clients: list[int]
    sizes: dict[int, int]
    input_shape: tuple[int, ...]
    n_classes: int | None
    context: WorkContext
    cohort_size: int
    quick: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    client_values: dict[int, dict[str, float]] = field(default_factory=dict)
    planted: dict[int, int] | None = None
    progress: Callable[[str], None] = lambda text: None

    def ask(
        self,
        actions: str | Sequence[str],
        to: Mapping[int, Mapping[str, Value]] | Sequence[int],
        *,
        shared: Mapping[str, Value] | None = None,
        on_reply: OnReply | None = None,
    ) -> dict[int, Message]:
        """`Backend.ask`; a plain list of client ids stands for empty messages to them."""
        messages = to if isinstance(to, Mapping) else {client: {} for client in to}
        before = len(self.backend.failures)
        try:
            replies = self.backend.ask(actions, messages, shared=shared, on_reply=on_reply)
        except RoundFailedError:
            self._note_failures(before)
            raise
        self._note_failures(before)
        return replies

    def _note_failures(self, before: int) -> None:
        for failure in self.backend.failures[before:]:
            self.note(
                f"client {failure.client} failed in {failure.action!r} and was left out of that trip; `failures` of "
                "the summary lists every time"
            )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the block to `seconds[name]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def note(self, text: str) -> None:
        """Keeps a sentence for the result and logs it as a warning, the first time."""
        if text not in self.notes:
            self.notes.append(text)
            _log.warning(text)

    def rng(self, purpose: str) -> torch.Generator:
        """A generator for (seed, round, "server", purpose)."""
        return self.context.rng(purpose)


class Algorithm(ABC):
    """A federated method, seen from the server. One round reads like the paper's pseudo-code.

    Attributes:
        state_class: The dataclass of its state.
        default_monitor: Metric and mode for early stopping and the best checkpoint, without labels where it can be.
        label_metrics: Names (without the split) of metrics that need labels.
        personal: Whether clients use different models, so that predicting needs to know whose.
        client_actions: Actions that the client module must have.
        client_class: Name of the client module that has them, for messages.
    """

    state_class: ClassVar[type[State]]
    default_monitor: ClassVar[tuple[str, str]]
    label_metrics: ClassVar[frozenset[str]] = frozenset({"acc", "nmi", "ari"})
    personal: ClassVar[bool] = False
    client_actions: ClassVar[tuple[str, ...]] = ()
    client_class: ClassVar[str] = ""

    def check(self, server: Server) -> None:  # noqa: B027 (a method that can work with any data needs none)
        """Raises ValueError, naming the client or the field, for what cannot work; runs before any training."""

    @abstractmethod
    def start(self, server: Server) -> State:
        """All that happens before the first round."""

    @abstractmethod
    def round(self, state: State, cohort: list[int], server: Server) -> tuple[State, Metrics]:
        """One round with the clients of `cohort`; returns the new state and metrics (`train/…`)."""

    @abstractmethod
    def evaluate(self, state: State, server: Server, split: str) -> Metrics:
        """Metrics on one split ("val" or "test"), names without the split."""

    @abstractmethod
    def assign(self, state: State, server: Server, client: int, split: str) -> Message:
        """Clusters of one client's rows: "rows", "cluster" and "distance", one entry per row."""

    @classmethod
    @abstractmethod
    def module_for(cls, state: State, module: ClientModule) -> ClientModule:
        """Loads the state's model into `module` for prediction on new rows, and returns it."""

    @classmethod
    def module_for_client(
        cls, state: State, module: ClientModule, client: int, own: Mapping[str, Value]
    ) -> ClientModule:
        """Loads the model that one client uses, and returns the module; here the state's, the same for all.

        Args:
            state: The state.
            module: Of the clients' class, built.
            client: The client's id.
            own: The client's own state between rounds, as a checkpoint holds it.
        """
        return cls.module_for(state, module)

    @classmethod
    def assignments(cls, state: State) -> dict[int, int] | None:
        """Client id → cluster, for the clients that have one; None for a method that does not group clients."""
        return None

    @classmethod
    def tables(cls, state: State) -> dict[str, list[dict[str, float]]]:
        """Tables for the run's directory beside the usual ones: name of the file without its ending → rows."""
        return {}

    @classmethod
    def assign_client(cls, state: State, module: ClientModule, ctx: ClientContext) -> int:
        """The cluster of a client that was not there.

        Args:
            state: The state.
            module: Of the clients' class, built.
            ctx: The new client's rows and generators.

        Raises:
            ValueError: If the method does not group clients.
        """
        raise ValueError(f"{cls.__name__} does not group clients")

    @classmethod
    def module_for_cluster(cls, state: State, module: ClientModule, cluster: int) -> ClientModule:
        """Loads the model of one cluster of clients, and returns the module.

        Raises:
            ValueError: If the method has no model per cluster, or no such cluster.
        """
        raise ValueError(f"{cls.__name__} has no model per cluster")

    @classmethod
    def signature_of(cls, state: State, client: int, own: Mapping[str, Value]) -> Message:
        """What describes a client's data where clients are grouped by it.

        Args:
            state: The state.
            client: The client's id.
            own: The client's own state between rounds, as a checkpoint holds it.

        Raises:
            ValueError: If the method asks for no such thing, or has none of this client.
        """
        raise ValueError(f"{cls.__name__} has no signatures")

    def metric_names(self, labels: bool) -> frozenset[str]:
        """Names that can be monitored, so that a misspelt monitor is refused before training; empty if not known.

        Args:
            labels: Whether the data has labels.
        """
        return frozenset()

    def loss_terms(self) -> tuple[str, ...]:
        """Metrics whose sum is the training loss without sampled weights, so that runs with other weights compare."""
        return ("train/loss",)

    def uses_labels(self, monitor: str) -> bool:
        """Whether a monitor needs labels."""
        return monitor.rpartition("/")[2] in self.label_metrics
