"""What the messages and vectors of sums hold, and the checks of it that all modes share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch

from fedclust.checks import positive_int

Value: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | int | float | str | bool | bytes | None"
Message: TypeAlias = "dict[str, Value]"
T = TypeVar("T")

_EXACT = 2**53


def client_ids(clients: Iterable[int]) -> tuple[int, ...]:
    """The ids in ascending order.

    Raises:
        ValueError: for an id that is no whole number from 0 to 2⁶³ − 1 or is given twice.
    """
    ids = sorted(positive_int("client", client, least=0) for client in clients)
    twice = [one for one, two in pairwise(ids) if one == two]
    if twice or (ids and ids[-1] >= 2**63):
        raise ValueError(f"client ids must differ and lie below 2**63, got {f'{twice[0]} twice' if twice else ids[-1]}")
    return tuple(ids)


def read(message: Mapping[str, Value], name: str, kind: type[T], who: str) -> T:
    """The value of that name.

    Raises:
        ValueError: naming ``who``, if it is missing or not of that kind.
    """
    value = message.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        got = f"a {type(value).__name__}" if name in message else f"only {sorted(message)}"
        raise ValueError(f"{who}: the message needs {name!r} of type {kind.__name__}, got {got}")
    return value


def as_vector(vector: Any, length: int, bound: float, who: str) -> np.ndarray:
    """``vector`` as (length,) float64.

    Raises:
        ValueError: naming ``who``, for another shape, other values than numbers, NaN, infinity, an integer beyond 2⁵³
            or a value outside ±``bound``.
    """
    if isinstance(vector, torch.Tensor):
        vector = vector.detach().cpu()
        vector = (vector.double() if vector.is_floating_point() else vector).numpy()
    array = np.asarray(vector)
    if array.shape != (length,) or array.dtype.kind not in "iuf":
        raise ValueError(
            f"{who}: needs a vector of {length} numbers, got shape {array.shape} of {array.dtype}"
            if vector is not None
            else f"{who}: step 'input' needs the vector"
        )
    wide = array.astype(np.float64)
    bad = int(np.count_nonzero(~np.isfinite(wide)))
    if bad:
        raise ValueError(f"{who}: {bad} of {length} values are NaN or infinite")
    outside = np.flatnonzero(np.abs(wide) > (min(bound, _EXACT) if array.dtype.kind in "iu" else bound))
    if outside.size:
        at = int(outside[0])
        limit = f"the bound ±{bound:g}" if abs(wide[at]) > bound else "±2**53, where integers are exact"
        raise ValueError(f"{who}: value {array[at]} at position {at} lies outside {limit} ({outside.size} do)")
    return wide
