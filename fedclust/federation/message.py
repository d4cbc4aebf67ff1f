"""Messages: what server and clients may say to each other, and what it weighs."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch

Value: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | int | float | str | bool | bytes | None"
Message: TypeAlias = "dict[str, Value]"

_ARRAY_TYPES = frozenset(
    [
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
        "float64", "complex64", "complex128",
    ]
)  # fmt: skip
_PLAIN_TYPES = (int, float, str, bool, bytes)
_NUMBER_BYTES = 8


def check_message(message: Mapping[str, object], who: str) -> Message:
    """Returns `message` as a plain dict after checking that it is flat and holds allowed types only.

    Args:
        message: Names to tensors, numeric arrays, numbers, strings, bools, bytes or None.
        who: Whose message it is, for the error text.

    Raises:
        TypeError: If a name is no string or a value is nested or of another type.
    """
    if not isinstance(message, Mapping):
        raise TypeError(f"{who}: a message is a mapping from names to values, not {type(message).__name__}")
    checked: Message = {}
    for name, value in message.items():
        if not isinstance(name, str):
            raise TypeError(f"{who}: message names are strings, not {name!r}")
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, np.ndarray) and str(value.dtype) not in _ARRAY_TYPES:
            raise TypeError(
                f"{who}: array {name!r} has dtype {value.dtype}; only bools and numbers of up to 64 bits per part, in "
                "native byte order, travel"
            )
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise TypeError(f"{who}: tensor {name!r} has layout {value.layout}; only dense tensors travel")
        # Exact types: a subclass, such as an enum, could not be read back without unpickling its class.
        if value is not None and not isinstance(value, (torch.Tensor, np.ndarray)) and type(value) not in _PLAIN_TYPES:
            raise TypeError(
                f"{who}: {name!r} is a {type(value).__name__}; a message holds tensors, numeric arrays, int, float, "
                "str, bool, bytes or None, without nesting"
            )
        checked[name] = cast(Value, value)
    return checked


def value_bytes(value: Value) -> int:
    """Size of one value: a tensor's or array's own bytes, a string's UTF-8 bytes, 8 for a number, 0 for None."""
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    return _NUMBER_BYTES


def message_bytes(message: Mapping[str, Value]) -> int:
    """Size of a message in bytes; names are not counted."""
    return sum(value_bytes(value) for value in message.values())


def digest(value: Value) -> bytes:
    """A fingerprint of one value's type, shape and content."""
    state = hashlib.blake2b(digest_size=16)
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        # A column of one element counts as contiguous but keeps its stride; as_strided makes it plain.
        flat = value.detach().cpu().contiguous().flatten()
        state.update(flat.as_strided((flat.numel(),), (1,)).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        state.update(f"{value.dtype}{value.shape}".encode())
        state.update(np.ascontiguousarray(value).data)
    else:
        state.update(f"{type(value).__name__}:{value!r}".encode())
    return state.digest()


def pack(message: Mapping[str, Value]) -> bytes:
    """Serialises a message without pickled objects; `unpack` reads it back, types and dtypes unchanged."""
    plain: dict[str, Any] = {}
    arrays: list[str] = []
    for name, value in message.items():
        if isinstance(value, np.ndarray):
            arrays.append(name)
            plain[name] = torch.from_numpy(np.array(value, order="C"))
        elif isinstance(value, torch.Tensor):
            plain[name] = value.detach().cpu().clone()
        else:
            plain[name] = value
    buffer = io.BytesIO()
    torch.save({"values": plain, "arrays": arrays}, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Message:
    """Reads what `pack` wrote."""
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    message: Message = loaded["values"]
    for name in loaded["arrays"]:
        tensor = message[name]
        assert isinstance(tensor, torch.Tensor)
        message[name] = tensor.numpy()
    return message


def copied(message: Mapping[str, Value]) -> Message:
    """A copy that shares no memory with the message, its tensors detached."""
    copy: Message = {}
    for name, value in message.items():
        if isinstance(value, torch.Tensor):
            copy[name] = value.detach().clone()
        else:
            copy[name] = value.copy() if isinstance(value, np.ndarray) else value
    return copy


def with_prefix(prefix: str, values: Mapping[str, Value]) -> Message:
    """Puts `prefix/` before every name."""
    return {f"{prefix}/{name}": value for name, value in values.items()}


def tensors_under(prefix: str, message: Mapping[str, Value]) -> dict[str, torch.Tensor]:
    """The tensors whose names start with `prefix/`, without it.

    Raises:
        KeyError: If there is none.
    """
    found = any_tensors_under(prefix, message)
    if not found:
        raise KeyError(f"the message holds no tensors under {prefix + '/'!r}; it has {sorted(message)[:8]}")
    return found


def any_tensors_under(prefix: str, message: Mapping[str, Value]) -> dict[str, torch.Tensor]:
    """The tensors whose names start with `prefix/`, without it; there may be none."""
    start = f"{prefix}/"
    return {
        name[len(start) :]: value
        for name, value in message.items()
        if name.startswith(start) and isinstance(value, torch.Tensor)
    }


def read_tensor(message: Mapping[str, Value], name: str) -> torch.Tensor:
    """The tensor of that name.

    Raises:
        KeyError: If the name is missing.
        TypeError: If the value is no tensor.
    """
    value = message[name]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name!r} must be a tensor, not {type(value).__name__}")
    return value


def read_number(message: Mapping[str, Value], name: str) -> float:
    """The number (or tensor of one entry) of that name, as a float.

    Raises:
        KeyError: If the name is missing.
        TypeError: If the value is no number.
    """
    value = message[name]
    if not isinstance(value, (int, float, torch.Tensor)):
        raise TypeError(f"{name!r} must be a number, not {type(value).__name__}")
    return float(value)


def read_int(message: Mapping[str, Value], name: str) -> int:
    """The whole number of that name.

    Raises:
        KeyError: If the name is missing.
        TypeError: If the value is no whole number.
    """
    value = message[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name!r} must be a whole number, not {value!r}")
    return value
