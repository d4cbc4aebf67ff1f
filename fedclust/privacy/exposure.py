"""Whose vector follows from sums: what a server that knows which vectors are in which sum can compute."""

from __future__ import annotations

import torch
from torch import Tensor

# Entries of the combinations are small whole numbers, so what is left of one that is new is far larger than this.
_NOTHING = 1e-9


def extended(known: Tensor, combinations: Tensor) -> Tensor:
    """What a server knows after it was told further sums.

    Args:
        known: (r, n) float64, orthonormal rows that span the combinations of n vectors whose value it knows.
        combinations: (m, n) coefficients of the vectors in each further sum.

    Returns:
        (r', n) float64, orthonormal, r' >= r.
    """
    rest = combinations.to(torch.float64)
    for _ in range(2):  # the second time takes off what rounding left of the known part
        rest = rest - rest @ known.T @ known
    _, sizes, directions = torch.linalg.svd(rest, full_matrices=False)
    return torch.cat([known, directions[sizes > _NOTHING]])


def determined(known: Tensor) -> list[int]:
    """Vectors that follow from the known combinations by linear algebra alone, ascending.

    Args:
        known: (r, n) float64, as from `extended`.
    """
    return torch.nonzero(known.square().sum(0) > 1 - _NOTHING).flatten().tolist()
