"""How a trip travels to a worker process and its outcome back: in shared memory, with a few numbers in a pipe."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from fedclust.federation.message import Message, Value, with_prefix
from fedclust.federation.resident import Outcome, Trip
from fedclust.federation.shared_memory import Reader, Segment, Written

# A client may be sent to a worker while it works for another: two places for messages in each direction. No more than
# two orders and two reports are under way at a time, and everything of any size in them lies in shared memory, so both
# always fit into the pipe: neither side ever waits for the other to read.
SLOTS = 2


@dataclass(frozen=True)
class Order:
    """One trip of one client: where its message, state and secrets lie.

    Attributes:
        number: Running number in this worker; says which slot is used.
        client: Client id.
        round: The round.
        actions: Names of the actions.
        shared: Where the values for all clients lie, and a number that changes with them.
        own: Where the client's own message lies; names are `message/…`, `state/…`, `vault/…`.
    """

    number: int
    client: int
    round: int
    actions: list[str]
    shared: tuple[int, Written]
    own: Written


@dataclass(frozen=True)
class Report:
    """Where one client's outcome lies.

    Attributes:
        number: Number of the order.
        client: Client id.
        written: Replies, state and secrets (`reply POSITION/…`, `state/…`, `vault/…`), or the failure and its error.
        actions: Names of the actions that were done; None if the trip failed.
    """

    number: int
    client: int
    written: Written
    actions: list[str] | None


def pack_trip(number: int, trip: Trip, shared: tuple[int, Written], segment: Segment) -> Order:
    """Writes what only this client is sent; its message must not hold the shared values."""
    own = {
        **with_prefix("message", trip.message),
        **with_prefix("state", trip.state),
        **with_prefix("vault", trip.vault),
    }
    return Order(number, trip.client, trip.round, list(trip.actions), shared, segment.write(own))


def open_trip(order: Order, shared: Message, own: Message) -> Trip:
    """The trip that an order stands for."""
    message = {**shared, **_below("message", own)}
    return Trip(order.client, order.round, order.actions, message, _below("state", own), _below("vault", own))


def pack_outcome(number: int, outcome: Outcome, segment: Segment) -> Report:
    """Writes replies, state and secrets; of a failed trip only the failure goes back."""
    if outcome.failure is not None:
        failed: Message = {"failure": pickle.dumps(outcome.failure), "error": _packed(outcome.error)}
        return Report(number, outcome.client, segment.write(failed), None)
    message = {**with_prefix("state", outcome.state), **with_prefix("vault", outcome.vault)}
    for position, reply in enumerate(outcome.replies.values()):
        message |= with_prefix(f"reply {position}", reply)
    return Report(number, outcome.client, segment.write(message), list(outcome.replies))


def open_outcome(report: Report, reader: Reader, slot: str) -> Outcome:
    """The outcome that a report stands for."""
    message = reader.read(report.written, slot)
    if report.actions is None:
        failure, error = (_unpacked(message[name]) for name in ("failure", "error"))
        return Outcome(report.client, {}, {}, failure=failure, error=error)
    replies = {name: _below(f"reply {position}", message) for position, name in enumerate(report.actions)}
    return Outcome(report.client, replies, _below("state", message), _below("vault", message))


def _below(prefix: str, message: Message) -> Message:
    start = f"{prefix}/"
    return {name[len(start) :]: value for name, value in message.items() if name.startswith(start)}


def _packed(error: Exception | None) -> bytes | None:
    """An exception for another process, or None where it cannot travel; the failure has its text in any case."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # an exception class may do anything when it is pickled
        return None
    return packed


def _unpacked(packed: Value) -> Any:
    return pickle.loads(packed) if isinstance(packed, bytes) else None
