"""Sums over clients, cut into the steps that messages carry: what plain, masked and encrypted sums have in common.

Every mode runs the same loop, whoever carries the messages::

    server = mode.server(clients, length, bound, round)
    for step in mode.steps:
        for client, request in server.requests(step).items():
            server.receive(client, mode.client(client, state[client]).reply(request, vector))
    total = server.result()

Messages are flat dicts of arrays, numbers, strings and bytes. A client whose reply does not come has dropped out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from fedclust.checks import positive, positive_int
from fedclust.privacy.values import Message, Value, client_ids, read


class NoSum(ValueError):
    """No sum is given.

    Attributes:
        revealed: Ids of clients whose sum the server can perhaps work out nevertheless.
    """

    revealed: tuple[int, ...] = ()


class TooFewClients(NoSum):
    """Fewer clients are left than a sum needs; nothing was revealed and nothing is returned."""


class WrongReplies(NoSum):
    """What clients sent in the last step does not give a sum; some of it may be right.

    Args:
        text: What is wrong.
        revealed: See `NoSum`.
    """

    def __init__(self, text: str, revealed: tuple[int, ...]) -> None:
        super().__init__(text)
        self.revealed = revealed


@dataclass(frozen=True)
class Sum:
    """A sum and who is in it.

    Attributes:
        total: (length,) float64.
        survivors: Ids of the clients whose vectors are in ``total``, ascending.
    """

    total: np.ndarray
    survivors: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many vectors are in the sum: the number to divide by."""
        return len(self.survivors)

    @property
    def mean(self) -> np.ndarray:
        """(length,) float64, ``total`` over :attr:`count`."""
        return self.total / self.count


class AggregationClient(ABC):
    """A client's side of a sum: answers one request after the other.

    Args:
        client: Its id, 0 or above.
        state: What :attr:`state` was after the reply before; nothing at first. It holds secrets of the client.

    Raises:
        ValueError: for a bad id.
    """

    def __init__(self, client: int, state: Mapping[str, Value] | None = None) -> None:
        self.client = positive_int("client", client, least=0)
        self._state: Message = dict(state or {})

    @property
    def who(self) -> str:
        """Start of the error messages, such as ``client 3``."""
        return f"client {self.client}"

    @property
    def state(self) -> Message:
        """What this client must remember until the next step, as a flat message that never leaves it."""
        return dict(self._state)

    def reply(self, request: Mapping[str, Value], vector: Any = None) -> Message:
        """The answer to one request of the server.

        Args:
            request: What the server sent.
            vector: (length,) numbers, an array or a tensor; needed in the step ``"input"``, ignored in the others.

        Raises:
            ValueError: naming the client, for a request out of order or one that does not fit, for a vector of another
                length, with NaN or infinite values or with values outside the bound. The state is then as before.
        """
        step, round = read(request, "step", str, self.who), read(request, "round", int, self.who)
        answer, self._state = self._reply(step, request, vector)
        return {"step": step, "round": round, **answer}

    @abstractmethod
    def _reply(self, step: str, request: Mapping[str, Value], vector: Any) -> tuple[Message, Message]:
        """Answer and new state."""


class AggregationServer(ABC):
    """The server's side of a sum: asks, collects, counts who is left.

    Args:
        clients: Ids of those who are asked.
        length: Of the vectors.
        bound: Largest absolute value that a vector may hold.
        round: Number of the round.
        needed: How many clients must reply in a step.

    Raises:
        TooFewClients: For fewer clients than are needed.
        ValueError: for ids that are bad or given twice, a bad length, bound or round.
    """

    mode: ClassVar[str]
    steps: ClassVar[tuple[str, ...]]

    def __init__(self, clients: Iterable[int], length: int, bound: float, round: int, needed: int) -> None:
        self.clients = client_ids(clients)
        self.length, self.bound = positive_int("length", length), positive("bound", bound)
        self.round, self.needed = positive_int("round", round, least=0), needed
        if len(self.clients) < needed:
            raise TooFewClients(
                f"{self.mode} needs at least {needed} clients, got {len(self.clients)}"
                + (": the sum of one vector is that vector" if needed == 2 else "")
            )
        self.alive = self.clients
        self._asked: tuple[int, ...] = ()
        self._replied: set[int] = set()
        self._position = 0
        self._open: str | None = None
        self._sum: Sum | None = None

    @property
    @abstractmethod
    def max_error(self) -> float:
        """Largest absolute error of an element of the sum, beside the rounding of float64 additions."""

    def requests(self, step: str) -> dict[int, Message]:
        """Closes the step before and opens this one: who did not reply until now has dropped out.

        Returns:
            The message for each client that is asked.

        Raises:
            TooFewClients: If too few replied to the step before, which then stays open for further replies.
            ValueError: If another step is next.
        """
        expected = self.steps[self._position] if self._position < len(self.steps) else "result"
        if step != expected:
            raise ValueError(f"{self.mode}: step {step!r} is out of order, {expected!r} is next")
        self._finish()
        self._open, self._position = step, self._position + 1
        self._asked, self._replied = self._whom(step), set()
        return {to: {"step": step, "round": self.round, **self._request(step, to)} for to in self._asked}

    def receive(self, client: int, reply: Mapping[str, Value]) -> None:
        """Takes one reply; the order of clients does not matter.

        Raises:
            ValueError: naming the client, for a reply that comes too late, twice or from a client that was not asked,
                or whose content does not fit. It is then not used.
        """
        who = f"client {client}"
        step, round = read(reply, "step", str, who), read(reply, "round", int, who)
        if (step, round) != (self._open, self.round):
            raise ValueError(
                f"{who}: its reply to step {step!r} of round {round} is not used, "
                + (f"step {self._open!r} of round {self.round} is open" if self._open else "no step is open")
            )
        if client not in self._asked:
            raise ValueError(f"{who} was not asked in step {step!r}; those asked: {list(self._asked)}")
        if client in self._replied:
            raise ValueError(f"{who} has replied to step {step!r} before")
        self._take(step, client, reply)
        self._replied.add(client)

    def result(self) -> Sum:
        """Closes the last step and gives the sum.

        Raises:
            TooFewClients: If too few replied to the last step, which then stays open for further replies.
            WrongReplies: If what was received does not fit together.
            ValueError: If steps are left.
        """
        if self._sum is None:
            if self._position < len(self.steps):
                raise ValueError(f"{self.mode}: no sum before step {self.steps[self._position]!r}")
            self._finish()
            self._sum = self._result()
        return self._sum

    def _finish(self) -> None:
        if self._open is None:
            return
        self._close(self._open, tuple(sorted(self._replied)))
        self._open = None

    def _require(self, step: str, replied: tuple[int, ...]) -> None:
        """Refuses to go on with too few."""
        if len(replied) < self.needed:
            missing = sorted(set(self.clients) - set(replied))
            raise TooFewClients(
                f"{self.mode}, round {self.round}, step {step!r}: {len(replied)} of {self.needed} needed clients "
                f"replied; without a reply: {missing}. No sum is given"
            )

    def _whom(self, step: str) -> tuple[int, ...]:
        return self.alive

    def _close(self, step: str, replied: tuple[int, ...]) -> None:
        self._require(step, replied)
        self.alive = replied

    @abstractmethod
    def _request(self, step: str, client: int) -> Message: ...

    @abstractmethod
    def _take(self, step: str, client: int, reply: Mapping[str, Value]) -> None: ...

    @abstractmethod
    def _result(self) -> Sum: ...


class Aggregation(Protocol):
    """A way to add vectors up. Its options are the server's: clients learn them from the requests and check them."""

    mode: ClassVar[str]
    steps: ClassVar[tuple[str, ...]]

    def server(self, clients: Iterable[int], length: int, bound: float, round: int = 0) -> AggregationServer:
        """The server's side of one sum; arguments as for :class:`AggregationServer`."""
        ...

    def client(self, client: int, state: Mapping[str, Value] | None = None) -> AggregationClient:
        """A client's side; arguments as for :class:`AggregationClient`."""
        ...
