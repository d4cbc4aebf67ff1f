"""The resident: one client module in one process, and the work that it does for one client after the other."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from fedclust.data.tables import ClientData
from fedclust.federation.client import ClientModule
from fedclust.federation.context import ClientContext, make_fabric
from fedclust.federation.errors import Failure
from fedclust.federation.local import LocalFit, LocalWork
from fedclust.federation.message import Message, check_message, copied

Together = Callable[[ClientModule, ClientContext, LocalWork], LocalFit]


class ClientSource(Protocol):
    """What a backend needs of a data module: the rows of one client."""

    n_clients: int

    def client(self, client: int) -> ClientData:
        """The train, val and test rows of one client."""
        ...


@dataclass
class Trip:
    """What one client is asked in one trip.

    Attributes:
        client: Client id.
        round: The round; 0 is the work before the first round.
        actions: Names of the actions, in the order in which they run.
        message: All that the client is sent, shared values included.
        state: A copy of the client's state; the client may change it.
        vault: A copy of the client's secrets.
    """

    client: int
    round: int
    actions: Sequence[str]
    message: Message
    state: Message = field(default_factory=dict)
    vault: Message = field(default_factory=dict)


@dataclass
class Outcome:
    """One client's replies to one trip, an entry per action, or its failure."""

    client: int
    replies: dict[str, Message]
    state: Message
    vault: Message = field(default_factory=dict)
    failure: Failure | None = None
    error: Exception | None = None


@dataclass
class Resident:
    """A client module with all that a trip needs beside its message.

    Attributes:
        module: The module; its weights are those of the client that worked last.
        data: The clients' rows.
        seed: The run's seed.
        device: Where the work runs.
        precision: Lightning's name of the precision.
    """

    module: ClientModule
    data: ClientSource
    seed: int
    device: torch.device
    precision: str

    def work(self, trip: Trip, together: Together | None = None) -> Outcome:
        """Runs the actions of one client; an error becomes part of the outcome.

        Args:
            trip: What the client is asked.
            together: Does the client's local fits together with others; None trains it by itself.
        """
        outcome = Outcome(trip.client, {}, trip.state, trip.vault)
        current = trip.actions[0]
        try:
            ctx = ClientContext(
                who=f"client {trip.client}",
                round=trip.round,
                seed=self.seed,
                fabric=make_fabric(self.device, self.precision),
                id=trip.client,
                data=self.data.client(trip.client),
                state=trip.state,
                vault=trip.vault,
                together=together,
            )
            for current in trip.actions:
                reply = self.module.act(current, trip.message, ctx)
                # Copied, because the next client's work may change what a reply refers to on the resident module.
                outcome.replies[current] = copied(check_message(reply, f"{ctx.who}, action {current!r}"))
            outcome.state = check_message(ctx.state, f"{ctx.who}, state")
            outcome.vault = check_message(ctx.vault, f"{ctx.who}, vault")
            _check_disjoint(outcome)
        except Exception as error:  # the policy decides; nothing is swallowed: see Backend.ask
            text = f"{type(error).__name__}: {error}"
            outcome.failure = Failure(trip.client, trip.round, current, text, traceback.format_exc())
            outcome.error = error
        return outcome


def _check_disjoint(outcome: Outcome) -> None:
    seen: set[str] = set()
    for name, reply in outcome.replies.items():
        twice = sorted(seen & reply.keys())
        if twice:
            raise ValueError(f"action {name!r} repeats the reply names {twice} of an action before it in the same trip")
        seen |= reply.keys()
