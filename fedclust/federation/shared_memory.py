"""Messages and rows in memory that several processes see, so that tensors need not go through a pipe."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.data.tables import SPLITS, ClientData, Table
from fedclust.federation.message import Message, Value
from fedclust.federation.resident import ClientSource

_ALIGNMENT = 64
# Segments have sizes of whole powers of two, so that their names are known.
_SMALLEST, _LARGEST = 16, 40


@dataclass(frozen=True)
class Written:
    """Where a message lies; of the same few bytes in a pipe, whatever the message.

    Attributes:
        segment: Name of the shared memory; empty for an empty message.
        offset: Where the message's list of contents begins, in bytes.
        size: Bytes of that list.
    """

    segment: str
    offset: int
    size: int


@dataclass(frozen=True)
class _Block:
    """Where one large value lies: its type, and of tensors and arrays the form."""

    kind: type
    offset: int
    size: int
    dtype: Any = None
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


class Segment:
    """A piece of shared memory that holds one message at a time and grows when one does not fit.

    The writer owns it. A message must be read before the next one is written.

    Args:
        prefix: Start of the memory's name; None draws one.
    """

    def __init__(self, prefix: str | None = None) -> None:
        self._prefix = f"fc{secrets.token_hex(6)}" if prefix is None else prefix
        self._memory: SharedMemory | None = None

    def write(self, message: Mapping[str, Value]) -> Written:
        """Writes a message; returns where it lies."""
        if not message:
            return Written("", 0, 0)
        contents: dict[str, _Block | Value] = {}
        sources: list[tuple[int, np.ndarray[Any, Any]]] = []
        end = 0
        for name, value in message.items():
            if not isinstance(value, Tensor | np.ndarray | bytes):
                contents[name] = value
                continue
            contents[name], content = _block(value, end)
            sources.append((end, content))
            end += -(-content.nbytes // _ALIGNMENT) * _ALIGNMENT
        # The list of contents is in shared memory too: a pipe has room for a few kilobytes, and whoever sends more
        # waits for a reader. Two processes that send to each other would then wait for ever.
        listed = np.frombuffer(pickle.dumps(contents), np.uint8)
        memory = self._at_least(end + listed.nbytes)
        for offset, content in [*sources, (end, listed)]:
            _place(memory, offset, content.nbytes)[...] = content
        return Written(memory.name, end, listed.nbytes)

    def close(self) -> None:
        """Gives the memory back."""
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()
            self._memory = None

    def _at_least(self, size: int) -> SharedMemory:
        if self._memory is None or self._memory.size < size:
            self.close()
            bits = max(_SMALLEST, max(size - 1, 1).bit_length())
            self._memory = SharedMemory(_name(self._prefix, bits), create=True, size=1 << bits)
        return self._memory


def remove_segment(prefix: str) -> None:
    """Removes what the `Segment` of a process that was killed has left."""
    for bits in range(_SMALLEST, _LARGEST + 1):
        try:
            memory = SharedMemory(_name(prefix, bits))
        except (FileNotFoundError, OSError):
            continue
        memory.close()
        memory.unlink()


class Reader:
    """Reads what `Segment.write` wrote in another process."""

    def __init__(self) -> None:
        self._open: dict[str, SharedMemory] = {}

    def read(self, written: Written, slot: str) -> Message:
        """A copy of the message.

        Args:
            written: Where it lies.
            slot: Name of the segment's place; a new segment in the same place closes the one before it.
        """
        if not written.segment:
            return {}
        memory = self._memory(written.segment, slot)
        contents: dict[str, _Block | Value] = pickle.loads(_place(memory, written.offset, written.size).tobytes())
        return {name: _value(memory, found) if isinstance(found, _Block) else found for name, found in contents.items()}

    def close(self) -> None:
        """Lets go of all memory that was read from."""
        for memory in self._open.values():
            memory.close()
        self._open = {}

    def _memory(self, name: str, slot: str) -> SharedMemory:
        known = self._open.get(slot)
        if known is None or known.name != name:
            if known is not None:
                known.close()
            self._open[slot] = known = SharedMemory(name=name)
        return known


def _name(prefix: str, bits: int) -> str:
    return f"{prefix}-{bits}"


def _place(memory: SharedMemory, offset: int, size: int) -> np.ndarray[Any, Any]:
    return np.ndarray((size,), np.uint8, memory.buf, offset)


def _block(value: Tensor | np.ndarray[Any, Any] | bytes, offset: int) -> tuple[_Block, np.ndarray[Any, Any]]:
    """How a value will lie at an offset, and its bytes, (n,) uint8."""
    if isinstance(value, bytes):
        return _Block(bytes, offset, len(value)), np.frombuffer(value, np.uint8)
    dense = _dense(value)
    content = _content(dense)
    kind, strides = (Tensor, dense.stride()) if isinstance(dense, Tensor) else (np.ndarray, ())
    return _Block(kind, offset, content.nbytes, dense.dtype, tuple(dense.shape), strides), content


def _value(memory: SharedMemory, block: _Block) -> Tensor | np.ndarray[Any, Any] | bytes:
    """A copy of the value that lies there."""
    content = _place(memory, block.offset, block.size)
    if block.kind is bytes:
        return content.tobytes()
    value: Tensor | np.ndarray[Any, Any]
    if block.kind is Tensor:
        value = torch.empty_strided(block.shape, block.strides, dtype=block.dtype)
    else:
        value = np.empty(block.shape, block.dtype)
    _content(value)[...] = content
    return value


def _dense(value: Tensor | np.ndarray[Any, Any]) -> Tensor | np.ndarray[Any, Any]:
    """The value on the CPU without gaps; a tensor keeps the order of its dimensions in memory."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(value.shape)
    value = value.detach().cpu()
    return value.contiguous() if value.is_contiguous() else value.clone()


def _content(value: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of a value without gaps, (n,) uint8, as a view."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1).view(np.uint8)
    flat = value.as_strided((value.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


# -- rows -----------------------------------------------------------------------------------------------------------


class SharedClients:
    """The rows of all clients, which other processes read in place.

    Tables of many clients are views of a few tensors; these are moved into shared memory once, so the rows exist once
    on the machine, and every view keeps its place in them.

    Args:
        data: The clients' rows; its tensors are moved, not copied.
    """

    def __init__(self, data: ClientSource) -> None:
        self.n_clients = data.n_clients
        self._tensors: list[Tensor] = []
        self._numbers: dict[tuple[int, torch.dtype], int] = {}
        self._tables = [
            [self._describe(getattr(data.client(client), split)) for split in SPLITS]
            for client in range(data.n_clients)
        ]

    def client(self, client: int) -> ClientData:
        """The train, val and test rows of one client."""
        train, val, test = (self._table(entry) for entry in self._tables[client])
        return ClientData(train, val, test)

    def _describe(self, table: Table) -> tuple[Any, Any, np.ndarray[Any, Any]]:
        return self._place(table.x), None if table.y is None else self._place(table.y), table.rows

    def _place(self, tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.dtype)
        if key not in self._numbers:
            storage.share_memory_()
            self._numbers[key] = len(self._tensors)
            count = storage.nbytes() // tensor.element_size()
            self._tensors.append(tensor.as_strided((count,), (1,), 0))
        return self._numbers[key], tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())

    def _table(self, entry: tuple[Any, Any, np.ndarray[Any, Any]]) -> Table:
        x, y, rows = entry
        return Table(self._tensor(x), None if y is None else self._tensor(y), rows)

    def _tensor(self, place: tuple[int, tuple[int, ...], tuple[int, ...], int]) -> Tensor:
        number, shape, strides, offset = place
        return self._tensors[number].as_strided(shape, strides, offset)


def picklable(value: object, what: str) -> bytes:
    """Pickles something for another process.

    Raises:
        TypeError: If that cannot be done; says what to change.
    """
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{what} cannot be sent to a worker process ({error}); define its class at the top of a module, without "
            "lambdas or open files in its attributes, or use the backend fedclust.InProcess"
        ) from error
