"""Shuffling of the users' reports, coordinate by coordinate, within groups of users."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.privacy.clipping import INTEGER_OF_SIZE
from fedclust.privacy.kernels import shuffle_columns
from fedclust.privacy.randomness import RandomSource, SecureRandom, Supply


def shuffle_coordinates(
    matrix: Tensor, groups: Any, source: RandomSource | None = None, out: Tensor | None = None
) -> tuple[Tensor, list[int]]:
    """Permute the rows of each group independently in every column (Section 5.5).

    Every column keeps its values within the group, so sums and means over a group do not change; which row a value
    came from is lost, and no two columns can be linked. A group of one cannot be shuffled.

    Args:
        matrix: (users, d₂) one report a row, of elements of at most 8 bytes; left as it is, unless it is ``out``.
        groups: (users,) integers, the group of each row.
        source: Of the random bits; the operating system's secure generator by default.
        out: Where to put the result: like ``matrix`` in shape, type and device. With ``matrix`` itself nothing is
            copied (contiguous, on the CPU).

    Returns:
        The shuffled (users, d₂), ``out`` if that is given, and the rows that are alone in their group, ascending:
        for those no amplification may be claimed.

    Raises:
        ValueError: if ``matrix`` is not two-dimensional or of larger elements, ``groups`` is no list of one integer
            per row, or ``out`` does not match.
    """
    labels = _labels(matrix, groups)
    result = _room(matrix, out)
    supply = Supply(source or SecureRandom())
    work = result.cpu().contiguous()
    # Values are moved, never looked at: types of one size share a kernel.
    numbers, alone = work.view(INTEGER_OF_SIZE[work.itemsize]).numpy(), []
    for group in np.unique(labels):
        rows = np.flatnonzero(labels == group)
        if len(rows) > 1:
            _shuffle_group(numbers, rows, supply)
        else:
            alone.append(int(rows[0]))
    if out is None:
        return work.to(matrix.device), sorted(alone)
    if work is not result:
        result.copy_(work)
    return out, sorted(alone)


def _labels(matrix: Tensor, groups: Any) -> np.ndarray:
    labels = np.asarray(groups.detach().cpu() if isinstance(groups, Tensor) else groups)
    if matrix.ndim != 2:
        raise ValueError(f"matrix must have shape (users, coordinates), got {tuple(matrix.shape)}")
    if matrix.itemsize not in INTEGER_OF_SIZE:
        raise ValueError(f"matrix must have elements of at most 8 bytes, got {matrix.dtype}")
    if labels.shape != (len(matrix),) or labels.dtype.kind not in "iu":
        raise ValueError(
            f"groups must hold one integer for each of {len(matrix)} rows, got shape {labels.shape} of {labels.dtype}"
        )
    return labels


def _room(matrix: Tensor, out: Tensor | None) -> Tensor:
    """Memory that holds the reports and may be written."""
    if out is None:
        return torch.empty(matrix.shape, dtype=matrix.dtype).copy_(matrix.detach())
    if (out.shape, out.dtype, out.device) != (matrix.shape, matrix.dtype, matrix.device):
        raise ValueError(
            f"out must be like the matrix, {tuple(matrix.shape)} of {matrix.dtype} on {matrix.device}, "
            f"got {tuple(out.shape)} of {out.dtype} on {out.device}"
        )
    room = out.detach()
    return room if out is matrix else room.copy_(matrix.detach())


def _shuffle_group(numbers: np.ndarray, rows: np.ndarray, supply: Supply) -> None:
    """In place; the draws of a column go before those of the next."""
    column, last = 0, len(rows) - 1
    # A draw takes a byte for up to 256 rows and four for more; some are refused.
    draws = sum(1 if bound <= 256 else 4 for bound in range(2, len(rows) + 1))
    while column < numbers.shape[1]:
        column, last, used = shuffle_columns(numbers, rows, column, last, supply.at_hand)
        left = numbers.shape[1] - column
        supply.advance(used, draws * left + left // 4 + 1 if left else 0)
