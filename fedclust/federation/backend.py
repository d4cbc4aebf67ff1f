"""Backends: they carry messages between the server and the clients, and nothing else."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch

from fedclust.federation.client import ClientModule
from fedclust.federation.errors import ClientError, Failure, RefusedReplyError, RoundFailedError
from fedclust.federation.message import Message, Value, check_message
from fedclust.federation.resident import ClientSource, Outcome, Resident, Trip
from fedclust.federation.store import Fingerprints, StateStore, Traffic

OnReply = Callable[[int, Message], None]


class Backend(ABC):
    """Carries messages, counts them, keeps client state and applies the failure policy.

    Args:
        threads: Intra-op threads of every worker; equal numbers give equal bits on CPU. None leaves torch's setting.
        on_failure: "raise" stops at the first client that fails; "skip" goes on without it, unless all fail.
        state_budget_mb: Client state kept in memory, in MB (1e6 bytes); beyond it one file per client. None: no limit.
    """

    def __init__(
        self,
        threads: int | None = 1,
        on_failure: Literal["raise", "skip"] = "raise",
        state_budget_mb: float | None = None,
    ) -> None:
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
            raise ValueError(f"threads must be a positive integer or None, not {threads!r}")
        if on_failure not in ("raise", "skip"):
            raise ValueError(f"on_failure must be 'raise' or 'skip', not {on_failure!r}")
        self.threads = threads
        self.on_failure = on_failure
        self.round = 0
        self.failures: list[Failure] = []
        self.states = StateStore(None if state_budget_mb is None else int(state_budget_mb * 1e6))
        self.vaults: dict[int, Message] = {}
        self.traffic = Traffic()

    def connect(
        self, module: ClientModule, data: ClientSource, *, seed: int, device: torch.device, precision: str
    ) -> None:
        """Gives the backend its resident module, the clients' data and the run's settings; starts afresh."""
        self.resident = Resident(module, data, seed, device, precision)
        self.states.load({})
        self.vaults = {}
        self.traffic = Traffic()
        self.failures = []

    @property
    def module(self) -> ClientModule:
        """The resident module."""
        return self.resident.module

    @property
    def data(self) -> ClientSource:
        """The clients' rows."""
        return self.resident.data

    def use(self, device: torch.device, precision: str) -> None:
        """Goes on, without forgetting anything, on this device and in this precision."""
        self.resident = replace(self.resident, device=device, precision=precision)

    @property
    def is_open(self) -> bool:
        """Whether nothing has to be started before the next question."""
        return True

    def open(self) -> None:  # noqa: B027 (most backends have nothing to start)
        """Starts whatever runs beside this process, which the next question would do otherwise."""

    def close(self) -> None:  # noqa: B027 (most backends have nothing to end)
        """Ends whatever runs beside this process for the backend; the next question starts it again."""

    def trip(self, client: int, actions: list[str], message: Message) -> Trip:
        """What a client is asked, with copies of its state and secrets."""
        vault = dict(self.vaults.get(client, {}))
        return Trip(client, self.round, actions, message, self.states.get(client), vault)

    def limited_threads(self) -> AbstractContextManager[None]:
        """Runs torch with this backend's number of threads, for work on the server beside it."""
        return _torch_threads(self.threads)

    def ask(
        self,
        actions: str | Sequence[str],
        to: Mapping[int, Mapping[str, Value]],
        *,
        shared: Mapping[str, Value] | None = None,
        on_reply: OnReply | None = None,
    ) -> dict[int, Message]:
        """Has clients run one action, or several in one trip, and returns their replies.

        The bytes of a trip's message count for its first action, each reply for its own action. A shared value, or a
        tensor, that a client already holds (same name, same content) is not counted again.

        Args:
            actions: Name of one action, or names run in this order on the same message; their replies are merged.
            to: Client id → its own message.
            shared: Sent to all of them and held once per worker; actions must not change it.
            on_reply: Called with (client id, reply) in client-id order as replies are consumed; replies are then not
                kept and the returned dict is empty. A RefusedReplyError from it counts as a failure of the client.

        Returns:
            Client id → reply, for the clients that succeeded.

        Raises:
            ValueError: Unknown action or client, no client at all, or a name both in `shared` and in a message.
            ClientError: A client failed and the policy is "raise".
            RoundFailedError: All clients failed.
        """
        names = [actions] if isinstance(actions, str) else list(actions)
        shared = check_message(shared or {}, "server")
        messages = {client: check_message(to[client], "server") for client in sorted(to)}
        self._check(names, messages, shared)
        self._count_down(names[0], messages, shared)
        replies: dict[int, Message] = {}
        failed: list[Failure] = []
        # Closed at once when a failure ends the trip, so that nobody goes on working for it.
        with closing(self.run(names, messages, shared)) as outcomes:
            for arrived in in_order(outcomes, list(messages)):
                outcome = self._deliver(arrived, names[0], on_reply or replies.__setitem__)
                if outcome.failure is None:
                    continue
                failed.append(outcome.failure)
                self.failures.append(outcome.failure)
                if self.on_failure == "raise":
                    raise ClientError(outcome.failure) from outcome.error
        if len(failed) == len(messages):
            raise RoundFailedError(failed)
        return replies

    @abstractmethod
    def run(self, actions: list[str], messages: Mapping[int, Message], shared: Message) -> Generator[Outcome]:
        """Runs the actions on every client; yields outcomes in any order."""

    def _count_down(self, action: str, messages: Mapping[int, Message], shared: Message) -> None:
        fingerprints = Fingerprints()
        common = fingerprints.of(shared)
        for client, message in messages.items():
            prints = {**common, **fingerprints.of_tensors(message)}
            self.traffic.down(action, client, {**shared, **message}, prints)

    def _deliver(self, outcome: Outcome, action: str, to: OnReply) -> Outcome:
        """Hands the reply over; returns the outcome, which is a failure if the reply was refused."""
        if outcome.failure is not None:
            return outcome
        reply = self._accept(outcome)
        try:
            to(outcome.client, reply)
        except RefusedReplyError as refusal:
            failure = Failure(outcome.client, self.round, action, str(refusal), traceback.format_exc())
            return replace(outcome, failure=failure, error=refusal)
        return outcome

    def _accept(self, outcome: Outcome) -> Message:
        self.states.put(outcome.client, outcome.state)
        self.vaults[outcome.client] = outcome.vault
        merged: Message = {}
        for name, reply in outcome.replies.items():
            self.traffic.up(name, reply)
            merged.update(reply)
        return merged

    def _check(self, actions: list[str], messages: Mapping[int, Message], shared: Message) -> None:
        known = self.module.actions()
        unknown = [name for name in actions if name not in known]
        if not actions or unknown:
            raise ValueError(f"{type(self.module).__name__} has no action {unknown}; it has {known}")
        if len(set(actions)) < len(actions):
            raise ValueError(f"an action can run once per trip, got {actions}")
        if not messages:
            raise ValueError(f"action {actions[0]!r} was asked of no client")
        strangers = [client for client in messages if not 0 <= client < self.data.n_clients]
        if strangers:
            raise ValueError(f"clients {strangers} do not exist; ids are 0..{self.data.n_clients - 1}")
        for client, message in messages.items():
            twice = sorted(message.keys() & shared.keys())
            if twice:
                raise ValueError(f"names {twice} are both shared and in the message to client {client}")


class InProcess(Backend):
    """Runs every client in this process, one after the other, on one resident module.

    Args:
        threads: Intra-op threads; see `Backend`.
        on_failure: "raise" or "skip"; see `Backend`.
        state_budget_mb: Client state kept in memory; see `Backend`.
    """

    def run(self, actions: list[str], messages: Mapping[int, Message], shared: Message) -> Generator[Outcome]:
        """Runs the clients in the order of `order`."""
        for client in self.order(list(messages)):
            trip = self.trip(client, actions, {**shared, **messages[client]})
            with self.limited_threads():
                outcome = self.resident.work(trip)
            yield outcome

    def order(self, clients: list[int]) -> list[int]:
        """The order in which clients run; no order changes a result."""
        return clients


def in_order(outcomes: Iterator[Outcome], clients: list[int]) -> Iterator[Outcome]:
    """Reorders outcomes into the order of `clients`, holding back only those that came early."""
    waiting: dict[int, Outcome] = {}
    expected = iter(clients)
    wanted = next(expected, None)
    for outcome in outcomes:
        waiting[outcome.client] = outcome
        while wanted in waiting:
            yield waiting.pop(wanted)
            wanted = next(expected, None)


@contextmanager
def _set_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _torch_threads(threads: int | None) -> AbstractContextManager[Any]:
    if threads is None or threads == torch.get_num_threads():
        return nullcontext()
    return _set_threads(threads)
