"""Important coordinates of a gradient: each user's top k, their common ranking, taking a vector apart and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.checks import positive_int, real_number


def count_of(ratio: float, d: int) -> int:
    """How many coordinates are important: max(1, ⌊ratio·d⌋).

    A product that misses a whole number by floating-point rounding alone counts as that number: .29 · 100 is 29.
    The paper's Figure 4 has ratio .2 and d = 36, hence 7.

    Raises:
        ValueError: unless 0 < ``ratio`` <= 1 and ``d`` is a whole number of at least 1.
    """
    share, d = real_number("ratio", ratio), positive_int("d", d)
    if not 0 < share <= 1:
        raise ValueError(f"ratio must be above 0 and at most 1, got {ratio!r}")
    product = share * d
    nearest = round(product)
    close = abs(product - nearest) <= 4 * sys.float_info.epsilon * product
    return max(1, nearest if close else math.floor(product))


def top_k_indices(values: Any, k: int, who: str = "") -> Tensor:
    """Indices of the k largest |values|, in descending order; ties go to the lower index (Section 5.2).

    The order is the same on every device.

    Args:
        values: (d,) floats: a tensor, an array or a list.
        k: How many, at least 1.
        who: Start of the error messages, such as ``"client 3"``.

    Returns:
        (k,) int64, on the device of ``values``.

    Raises:
        ValueError: naming ``who``, if ``values`` is not such a vector, holds NaN or infinite values, or has fewer
            than k coordinates.
    """
    name = f"{who}: " if who else ""
    vector = values.detach() if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    if vector.ndim != 1 or not vector.is_floating_point():
        raise ValueError(f"{name}need a vector of floats, got shape {tuple(vector.shape)} of {vector.dtype}")
    k = positive_int(f"{name}k", k)
    if k > len(vector):
        raise ValueError(f"{name}k = {k} important coordinates of a vector with {len(vector)} coordinates")
    bad = int((~torch.isfinite(vector)).sum())
    if bad:
        raise ValueError(f"{name}{bad} of {len(vector)} coordinates are NaN or infinite")
    return _largest(vector.abs(), k)


def global_ranking(sequences: Sequence[Any], k: int, ids: Sequence[Any] | None = None) -> Tensor:
    """The first k elements by p(e) = Σ 1 / (1 + position of e), over the sequences that hold e (Section 5.3).

    Positions count from 1; ties go to the lower index. The sums are taken in fixed point (52 bits less the bits of
    the number of sequences), so that their order cannot decide a tie.

    Args:
        sequences: One per user, (length,) integers of at least 0 without repetition; all of one length.
        k: How many elements.
        ids: The users' names for error messages; positions if None.

    Returns:
        (k,) int64 on the CPU.

    Raises:
        ValueError: naming the sequence, for sequences that differ in length, are empty, repeat an
            element or hold negative ones; if they hold fewer than k elements together; without any sequence.
    """
    k = positive_int("k", k)
    names_of = [f"sequence {name}" for name in (range(len(sequences)) if ids is None else ids)]
    rows = [_sequence(sequence, name) for sequence, name in zip(sequences, names_of, strict=True)]
    if not rows:
        raise ValueError("a ranking needs at least one sequence")
    for name, row in zip(names_of, rows, strict=True):
        if len(row) != len(rows[0]):
            raise ValueError(f"{name} has {len(row)} elements, {names_of[0]} has {len(rows[0])}: protocol error")
    flat = np.concatenate(rows)
    names, keys = _compact(flat)
    size = len(names) if names is not None else int(flat.max()) + 1
    _refuse_repeats(keys.reshape(len(rows), -1), size, names_of)
    weights = np.rint(2.0 ** (52 - len(rows).bit_length()) / (2.0 + np.arange(len(rows[0]))))
    scores = np.bincount(keys, weights=np.tile(weights, len(rows)), minlength=size)
    held = int(np.count_nonzero(scores))
    if k > held:
        raise ValueError(f"k = {k} elements of sequences that hold {held} different ones together")
    first = _largest(torch.from_numpy(scores), k)
    return first if names is None else torch.from_numpy(names)[first]


def split_important(vector: Tensor, indices: Any) -> tuple[Tensor, Tensor]:
    """The important part in the order of ``indices``, and all other coordinates in their original order (Section 5.5).

    Args:
        vector: (d,).
        indices: (d₁,) different integers below d.

    Returns:
        (d₁,) and (d − d₁,), copies: together they hold every coordinate exactly once.

    Raises:
        ValueError: for a vector of another shape, repeated indices, or indices out of range.
    """
    if vector.ndim != 1:
        raise ValueError(f"need a vector, got shape {tuple(vector.shape)}")
    index, rest = _both_parts(indices, len(vector), vector.device)
    return vector[index], vector[rest]


def join_important(important: Tensor, less: Tensor, indices: Any, d: int) -> Tensor:
    """The vector that :func:`split_important` took apart, every coordinate back in its place.

    Args:
        important: (d₁,) in the order of ``indices``.
        less: (d − d₁,) in the original order.
        indices: (d₁,) different integers below d.
        d: Length of the vector.

    Raises:
        ValueError: for lengths that do not add up to d, for types or devices that differ, and as
            :func:`split_important`.
    """
    d = positive_int("d", d)
    if important.dtype != less.dtype or important.device != less.device:
        raise ValueError(
            f"the parts differ in kind: {important.dtype} on {important.device}, {less.dtype} on {less.device}"
        )
    index, rest = _both_parts(indices, d, important.device)
    if important.shape != index.shape or less.shape != (d - len(index),):
        raise ValueError(
            f"{len(index)} indices take a vector of {d} apart into {len(index)} and {d - len(index)} coordinates, "
            f"got shapes {tuple(important.shape)} and {tuple(less.shape)}"
        )
    vector = important.new_empty(d)
    vector[index], vector[rest] = important, less
    return vector


def _largest(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest values, descending, ties by the lower index."""
    # topk breaks ties as it likes, but the k-th value itself is well defined.
    least = torch.topk(values, k, sorted=True).values[-1]
    above = torch.nonzero(values > least).flatten()
    equal = torch.nonzero(values == least).flatten()[: k - len(above)]
    ordered = torch.sort(values[above], descending=True, stable=True).indices
    return torch.cat([above[ordered], equal])


def _sequence(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a non-empty list of integers, got shape {array.shape} of {array.dtype}")
    # Unsigned types would wrap in any later difference.
    array = array.astype(np.int64)
    if array.min() < 0:
        raise ValueError(f"{name} holds {array.min()}; indices are at least 0")
    return array


def _compact(flat: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """(names, keys) with small keys: flat itself, unless its largest element would waste memory as a table's size."""
    if flat.max() < 16 * flat.size + (1 << 20):
        return None, flat
    return np.unique(flat, return_inverse=True)


def _refuse_repeats(keys: np.ndarray, size: int, names: Sequence[str]) -> None:
    places, order = np.zeros(size, dtype=np.int64), np.arange(keys.shape[1])
    for name, row in zip(names, keys, strict=True):
        places[row] = order
        if (places[row] != order).any():
            raise ValueError(f"{name} holds an element more than once")


def _both_parts(indices: Any, d: int, device: torch.device) -> tuple[Tensor, Tensor]:
    index = indices.detach() if isinstance(indices, Tensor) else torch.as_tensor(np.asarray(indices))
    if index.ndim != 1 or index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"indices must be a list of integers, got shape {tuple(index.shape)} of {index.dtype}")
    index = index.to(device=device, dtype=torch.int64)
    wrong = index[(index < 0) | (index >= d)]
    if len(wrong):
        raise ValueError(f"index {int(wrong[0])} lies outside 0 to {d - 1}")
    rest = torch.ones(d, dtype=torch.bool, device=device)
    rest[index] = False
    others = torch.nonzero(rest).flatten()
    if len(others) + len(index) != d:
        raise ValueError(f"{len(index) + len(others) - d} of {len(index)} indices repeat others")
    return index, others
