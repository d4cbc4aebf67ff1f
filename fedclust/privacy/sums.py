"""Sums of vectors by name of the mode, in the open as well, and a whole sum on one machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from fedclust.checks import choice
from fedclust.privacy.aggregation import Aggregation, AggregationClient, AggregationServer, Sum
from fedclust.privacy.ckks import CKKSSum
from fedclust.privacy.secure_sum import SecureSum
from fedclust.privacy.values import Message, Value, as_vector, client_ids, read

MODES = ("plain", "secure_sum", "ckks")


class PlainClient(AggregationClient):
    """A client that sends its vector as it is."""

    def _reply(self, step: str, request: Mapping[str, Value], vector: Any) -> tuple[Message, Message]:
        if step != "input":
            raise ValueError(f"{self.who}: a plain sum has no step {step!r}")
        length, bound = read(request, "length", int, self.who), read(request, "bound", float, self.who)
        return {"vector": as_vector(vector, length, bound, self.who)}, {}


class PlainServer(AggregationServer):
    """A server that sees every vector; one reply is enough."""

    mode = "plain"
    steps = ("input",)

    def __init__(self, clients: Iterable[int], length: int, bound: float, round: int) -> None:
        super().__init__(clients, length, bound, round, 1)
        self._total = np.zeros(self.length)

    @property
    def max_error(self) -> float:
        """0: nothing is rounded but additions of float64."""
        return 0.0

    def _request(self, step: str, client: int) -> Message:
        return {"length": self.length, "bound": self.bound}

    def _take(self, step: str, client: int, reply: Mapping[str, Value]) -> None:
        who = f"client {client}"
        self._total += as_vector(read(reply, "vector", np.ndarray, who), self.length, self.bound, who)

    def _result(self) -> Sum:
        return Sum(self._total.copy(), self.alive)


@dataclass(frozen=True)
class PlainSum:
    """Sums in the open, with the checks of the other modes: nothing is protected."""

    mode: ClassVar[str] = PlainServer.mode
    steps: ClassVar[tuple[str, ...]] = PlainServer.steps

    def server(self, clients: Iterable[int], length: int, bound: float, round: int = 0) -> PlainServer:
        """The server's side of one sum; see :class:`fedclust.privacy.aggregation.AggregationServer`."""
        return PlainServer(clients, length, bound, round)

    def client(self, client: int, state: Mapping[str, Value] | None = None) -> PlainClient:
        """A client's side."""
        return PlainClient(client, state)


@dataclass(frozen=True)
class LocalSum(Sum):
    """A sum that was run on one machine, and what it cost.

    Attributes:
        max_error: Largest absolute error of an element, beside the rounding of float64 additions.
        bytes_up: Bytes that each client sent, by client.
        bytes_down: Bytes that each client was sent, by client.
        client_seconds: Seconds of each client's own work, by client.
        server_seconds: Seconds of the server's work.
    """

    max_error: float
    bytes_up: dict[int, int]
    bytes_down: dict[int, int]
    client_seconds: dict[int, float]
    server_seconds: float


def make_aggregation(mode: str, **options: Any) -> Aggregation:
    """The aggregation of that name.

    Args:
        mode: ``"plain"``, ``"secure_sum"`` or ``"ckks"``.
        options: Of :class:`PlainSum`, :class:`fedclust.privacy.secure_sum.SecureSum` or
            :class:`fedclust.privacy.ckks.CKKSSum`.

    Raises:
        ValueError: for another mode, or options that are not allowed.
        ImportError: for ``"ckks"`` without TenSEAL, naming the extra.
    """
    makers: dict[str, Any] = {"plain": PlainSum, "secure_sum": SecureSum, "ckks": CKKSSum}
    try:
        return makers[choice("mode", mode, MODES)](**options)
    except TypeError as error:
        raise ValueError(f"mode {mode!r} does not take these options: {options}") from error


def sum_vectors(
    vectors: Mapping[int, Any],
    mode: str = "plain",
    *,
    bound: float | None = None,
    round: int = 0,
    dropped: Mapping[int, str] | Iterable[int] = (),
    **options: Any,
) -> LocalSum:
    """Runs a whole sum on this machine, all clients one after the other: for tests, benchmarks and first tries.

    Args:
        vectors: One per client id, all of one length.
        mode: ``"plain"``, ``"secure_sum"`` or ``"ckks"``.
        bound: Largest absolute value allowed; by default that of the vectors, which no real server would know.
        round: Number of the round.
        dropped: Clients that drop out: of step ``"input"``, after masks were exchanged, or of the step given.
        options: As :func:`make_aggregation`.

    Raises:
        ValueError: as the two sides do, or for a dropped client or step that does not exist.
        fedclust.privacy.aggregation.TooFewClients: If too few are left.
    """
    aggregation = make_aggregation(mode, **options)
    leaving = dict(dropped) if isinstance(dropped, Mapping) else dict.fromkeys(dropped, "input")
    for client, step in leaving.items():
        if client not in vectors or step not in aggregation.steps:
            raise ValueError(f"client {client} cannot drop out of {step!r}: {sorted(vectors)} in {aggregation.steps}")
    ids = client_ids(vectors)
    shape = np.shape(vectors[ids[0]]) if ids else ()
    length = int(shape[0]) if shape else 1
    start = time.perf_counter()
    server = aggregation.server(ids, length, _largest(vectors) if bound is None else bound, round)
    meter = _Meter(dict.fromkeys(ids, 0), dict.fromkeys(ids, 0), dict.fromkeys(ids, 0.0), time.perf_counter() - start)
    states: dict[int, Message] = {client: {} for client in ids}
    gone: set[int] = set()
    for step in aggregation.steps:
        gone.update(client for client, last in leaving.items() if last == step)
        start = time.perf_counter()
        requests = server.requests(step)
        meter.server += time.perf_counter() - start
        for client, request in requests.items():
            meter.down[client] += payload_bytes(request)
            if client not in gone:
                meter.trip(server, aggregation.client(client, states[client]), request, vectors[client], states)
    start = time.perf_counter()
    result = server.result()
    seconds = meter.server + time.perf_counter() - start
    return LocalSum(result.total, result.survivors, server.max_error, meter.up, meter.down, meter.clients, seconds)


@dataclass
class _Meter:
    up: dict[int, int]
    down: dict[int, int]
    clients: dict[int, float]
    server: float

    def trip(
        self,
        server: AggregationServer,
        side: AggregationClient,
        request: Message,
        vector: Any,
        states: dict[int, Message],
    ) -> None:
        """One client answers one request."""
        start = time.perf_counter()
        reply = side.reply(request, vector if request["step"] == "input" else None)
        states[side.client] = side.state
        middle = time.perf_counter()
        server.receive(side.client, reply)
        self.up[side.client] += payload_bytes(reply)
        self.clients[side.client] += middle - start
        self.server += time.perf_counter() - middle


def payload_bytes(message: Mapping[str, Value]) -> int:
    """Bytes of a message's values, as backends count them: 8 for a number, names not counted."""
    total = 0
    for value in message.values():
        if isinstance(value, torch.Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, np.ndarray):
            total += value.nbytes
        elif isinstance(value, (str, bytes)):
            total += len(value.encode() if isinstance(value, str) else value)
        elif value is not None:
            total += 8
    return total


def _largest(vectors: Mapping[int, Any]) -> float:
    """The largest finite absolute value, 1 if there is none."""
    largest = 0.0
    for vector in vectors.values():
        array = vector.detach().cpu().double().numpy() if isinstance(vector, torch.Tensor) else np.asarray(vector)
        if array.dtype.kind in "iuf":  # the clients' own checks name what holds something else
            # In float64, as the comparison with the bound: float32 would round the largest value below itself.
            wide = np.abs(array.astype(np.float64))
            largest = max(largest, float(np.max(wide, initial=0.0, where=np.isfinite(wide))))
    return largest or 1.0
