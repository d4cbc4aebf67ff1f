"""Client state between rounds, and the bytes that crossed the line."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from fedclust.federation.message import Message, Value, copied, digest, message_bytes, pack, unpack, value_bytes


class StateStore:
    """Keeps each client's state between rounds: in memory up to a budget, one file per client beyond it.

    Args:
        budget_bytes: Bytes kept in memory; None keeps everything in memory.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"the state budget is a number of bytes, at least 0, not {budget_bytes}")
        self._budget = budget_bytes
        self._memory: dict[int, Message] = {}
        self._sizes: dict[int, int] = {}
        self._in_memory = 0
        self._files: dict[int, Path] = {}
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def get(self, client: int) -> Message:
        """A copy of the client's state; empty for a client that never stored any."""
        if client in self._files:
            return unpack(self._files[client].read_bytes())
        return copied(self._memory.get(client, {}))

    def put(self, client: int, state: Message) -> None:
        """Replaces the client's state by a copy of `state`."""
        size = message_bytes(state)
        self._in_memory -= self._sizes.pop(client, 0)
        self._memory.pop(client, None)
        if self._budget is None or self._in_memory + size <= self._budget:
            if client in self._files:
                self._files.pop(client).unlink()
            self._memory[client], self._sizes[client] = copied(state), size
            self._in_memory += size
            return
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="fedclust-state-")
        path = Path(self._directory.name) / f"{client}.pt"
        path.write_bytes(pack(state))
        self._files[client] = path

    def export(self) -> dict[int, bytes]:
        """All states, packed, for a checkpoint."""
        clients = sorted({*self._memory, *self._files})
        return {client: pack(self.get(client)) for client in clients}

    def load(self, packed: Mapping[int, bytes]) -> None:
        """Replaces all states by those of a checkpoint."""
        for path in self._files.values():
            path.unlink()
        self._files, self._memory, self._sizes, self._in_memory = {}, {}, {}, 0
        for client, data in packed.items():
            self.put(client, unpack(data))


class Traffic:
    """Counts bytes per action, and knows what each client already holds, so that data sent once counts once."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._held: dict[int, dict[str, bytes]] = {}
        self._marked = {"up": 0, "down": 0}

    def down(self, action: str, client: int, message: Mapping[str, Value], prints: Mapping[str, bytes]) -> None:
        """Counts a message to a client, without the values that this client holds already.

        Args:
            action: The action that the bytes count for.
            client: The client.
            message: All that it is sent, shared values included.
            prints: Fingerprints of the values that a client can hold; all others count every time.
        """
        held = self._held.setdefault(client, {})
        total = 0
        for name, value in message.items():
            if name not in prints or held.get(name) != prints[name]:
                total += value_bytes(value)
            if name in prints:
                held[name] = prints[name]
        self._count(action, "down", total)

    def up(self, action: str, reply: Mapping[str, Value]) -> None:
        """Counts a reply."""
        self._count(action, "up", message_bytes(reply))

    def counts(self) -> dict[str, dict[str, int]]:
        """Bytes so far: {action: {"up": …, "down": …}}."""
        return {action: dict(both) for action, both in self._counts.items()}

    def total(self, direction: str) -> int:
        """All bytes so far in one direction, "up" or "down"."""
        return sum(both[direction] for both in self._counts.values())

    def since_mark(self) -> dict[str, int]:
        """Bytes in each direction since this was last called, also across an interruption."""
        totals = {direction: self.total(direction) for direction in self._marked}
        since = {direction: totals[direction] - before for direction, before in self._marked.items()}
        self._marked = totals
        return since

    def export(self) -> dict[str, object]:
        """Counts and what clients hold, for a checkpoint."""
        held = {client: dict(values) for client, values in self._held.items()}
        return {"counts": self.counts(), "held": held, "marked": dict(self._marked)}

    def load(self, saved: Mapping[str, object]) -> None:
        """Continues from a checkpoint."""
        counts, held, marked = saved["counts"], saved["held"], saved["marked"]
        assert isinstance(counts, Mapping)
        assert isinstance(held, Mapping)
        assert isinstance(marked, Mapping)
        self._marked = dict(marked)
        self._counts = {action: dict(both) for action, both in counts.items()}
        self._held = {int(client): dict(values) for client, values in held.items()}

    def _count(self, action: str, direction: str, size: int) -> None:
        self._counts.setdefault(action, {"up": 0, "down": 0})[direction] += size


class Fingerprints:
    """Digests of values, each object's computed once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Value, bytes]] = {}

    def of(self, values: Mapping[str, Value]) -> dict[str, bytes]:
        """Name → digest."""
        return {name: self._of(value) for name, value in values.items()}

    def of_tensors(self, values: Mapping[str, Value]) -> dict[str, bytes]:
        """Name → digest, of tensors and arrays only."""
        return self.of({name: value for name, value in values.items() if isinstance(value, Tensor | np.ndarray)})

    def _of(self, value: Value) -> bytes:
        if id(value) not in self._known:
            self._known[id(value)] = (value, digest(value))  # kept, so that no other object gets its id
        return self._known[id(value)][1]
