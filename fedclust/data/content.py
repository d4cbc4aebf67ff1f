"""A short description of the rows' values, by which a checkpoint notices that it is used with other data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedclust.data.tables import Table
from fedclust.random import torch_generator

_CHUNK = 4096
# Two machines may scale values to neighbouring float32 numbers, up or down: six standard deviations of such a sum.
_ROUNDING = 6 * torch.finfo(torch.float32).eps


def content_sums(tables: Sequence[Table]) -> Tensor:
    """Sums over the rows of each table, every row with a weight of its own; values that are not finite count as 0.

    Args:
        tables: Tables with rows of one shape.

    Returns:
        (2, len(tables), features + 1) float64: the weighted sums, and how far each of them may be off by rounding. The
        last column is that of the labels, exact, 0 without.
    """
    return torch.stack([_sums(table) for table in tables], dim=1)


def same_content(known: Tensor, own: Tensor) -> bool:
    """Whether rows are those that a checkpoint knows, up to rounding.

    Args:
        known: (tables, features + 1), the first half of a result of `content_sums`.
        own: The result of `content_sums` for the rows at hand.
    """
    if known.shape != own.shape[1:]:
        return False
    return bool(((known - own[0]).abs() <= own[1]).all())


def _sums(table: Table) -> Tensor:
    generator = torch_generator(0, "content")
    weights = torch.rand(len(table), dtype=torch.float64, generator=generator) + 0.5
    features = table.x.shape[1:].numel()
    sums = torch.zeros(2, features + 1, dtype=torch.float64)
    for own, x in zip(torch.split(weights, _CHUNK), torch.split(table.x, _CHUNK), strict=True):
        rows = x.reshape(len(x), features).double().nan_to_num(0.0, 0.0, 0.0)
        sums[0, :-1] += own @ rows
        sums[1, :-1] += own.square() @ rows.square()
    sums[1] = _ROUNDING * sums[1].sqrt()
    if table.y is not None:
        whole = torch.randint(1, 2**20, (len(table),), generator=generator)
        sums[0, -1] = (whole * table.y).sum()
    return sums
