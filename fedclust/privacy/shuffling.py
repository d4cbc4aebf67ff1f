"""Shuffling of the users' reports, coordinate by coordinate, within groups of users."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.privacy.randomness import RandomSource, SecureRandom, uniform_below

_ELEMENTS_AT_ONCE = 1 << 20


def shuffle_coordinates(matrix: Tensor, groups: Any, source: RandomSource | None = None) -> tuple[Tensor, list[int]]:
    """Permute the rows of each group independently in every column (Section 5.5).

    Every column keeps its values within the group, so sums and means over a group do not change; which row a value
    came from is lost, and no two columns can be linked. A group of one cannot be shuffled: a warning says so.

    Args:
        matrix: (users, d₂) one report a row; left as it is.
        groups: (users,) integers, the group of each row.
        source: Of the random bits; the operating system's secure generator by default.

    Returns:
        The shuffled (users, d₂) and the rows that are alone in their group, for which no amplification may be claimed.

    Raises:
        ValueError: if ``matrix`` is not two-dimensional or ``groups`` is no list of one integer per row.
    """
    labels = np.asarray(groups.detach().cpu() if isinstance(groups, Tensor) else groups)
    if matrix.ndim != 2:
        raise ValueError(f"matrix must have shape (users, coordinates), got {tuple(matrix.shape)}")
    if labels.shape != (len(matrix),) or labels.dtype.kind not in "iu":
        raise ValueError(
            f"groups must hold one integer for each of {len(matrix)} rows, got shape {labels.shape} of {labels.dtype}"
        )
    source = source or SecureRandom()
    result, alone = matrix.detach().clone(), []
    for group in np.unique(labels):
        rows = np.flatnonzero(labels == group)
        if len(rows) > 1:
            _shuffle_group(result, torch.from_numpy(rows).to(matrix.device), source)
        else:
            alone.append(int(rows[0]))
    alone.sort()
    if alone:
        warnings.warn(f"rows {alone} are alone in their group: no amplification by shuffling for them", stacklevel=2)
    return result, alone


def _shuffle_group(result: Tensor, rows: Tensor, source: RandomSource) -> None:
    """Fisher and Yates' shuffle of all columns at once, in place, some columns at a time to bound memory."""
    width = max(1, _ELEMENTS_AT_ONCE // len(rows))
    for start in range(0, result.shape[1], width):
        stop = min(start + width, result.shape[1])
        block = result[rows, start:stop]
        for last in range(len(rows) - 1, 0, -1):
            drawn = uniform_below(last + 1, stop - start, source).astype(np.int64)
            other = torch.from_numpy(drawn).to(result.device)[None]
            moved = block.gather(0, other)
            block.scatter_(0, other, block[last : last + 1].clone())
            block[last] = moved[0]
        result[rows, start:stop] = block
