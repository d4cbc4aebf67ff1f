"""A short description of the rows' values, by which a checkpoint notices that it is used with other data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedclust.data.tables import Table
from fedclust.random import torch_generator

_CHUNK = 4096
_TOLERANCE = 1e-6  # two machines may scale the same value to neighbouring float32 numbers


def content_sums(tables: Sequence[Table]) -> Tensor:
    """Sums over the rows of each table, every row with a weight of its own.

    Args:
        tables: Tables with rows of one shape.

    Returns:
        (2, len(tables), features + 1) float64: the weighted sums of the values and of their absolute values; the last
        column is that of the labels, 0 without.
    """
    return torch.stack([_sums(table) for table in tables], dim=1)


def same_content(one: Tensor, other: Tensor) -> bool:
    """Whether two results of `content_sums` are equal up to rounding."""
    if one.shape != other.shape:
        return False
    return bool(((one[0] - other[0]).abs() <= _TOLERANCE * torch.maximum(one[1], other[1])).all())


def _sums(table: Table) -> Tensor:
    weights = torch.rand(len(table), dtype=torch.float64, generator=torch_generator(0, "content"))
    features = table.x.shape[1:].numel()
    sums = torch.zeros(2, features + 1, dtype=torch.float64)
    for own, x in zip(torch.split(weights, _CHUNK), torch.split(table.x, _CHUNK), strict=True):
        rows = x.reshape(len(x), features).double()
        sums[0, :-1] += own @ rows
        sums[1, :-1] += own @ rows.abs()
    if table.y is not None:
        sums[:, -1] = weights @ table.y.double()
    return sums
