"""Which changes of assignments FLAMECHE may add up in a protected sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedclust.privacy.aggregation import TooFewClients
from fedclust.privacy.exposure import determined, extended


def combinations(before: Tensor, after: Tensor, n_clusters: int) -> Tensor:
    """(S·K, N) float64: how often each client's statistics enter the sum of each slot, by old and new slots (S, N)."""
    slots = torch.arange(n_clusters)[None, :, None]
    counts = (after[:, None] == slots).double() - (before[:, None] == slots).double()
    return counts.flatten(0, 1)


def without_exposure(known: Tensor, before: Tensor, after: Tensor, n_clusters: int) -> tuple[Tensor, list[int]]:
    """The moves that leave every client's statistics undetermined by all sums together.

    Clients whose statistics would follow keep their old slots; if that is not enough, all do.

    Args:
        known: (r, N) what the server was told so far; see `fedclust.privacy.exposure`.
        before: (S, N) slots that are counted; −1 for none.
        after: (S, N) slots that the clients would move to.
        n_clusters: K.

    Returns:
        The slots (S, N) to move to, and the clients that were held back.
    """
    after, held = after.clone(), set[int]()
    while exposed := determined(extended(known, combinations(before, after, n_clusters))):
        movers = set(torch.nonzero((before != after).any(0)).flatten().tolist())
        back = movers.intersection(exposed) or movers
        if not back:
            break  # the moves add nothing: what is exposed was so before
        held |= back
        after[:, sorted(back)] = before[:, sorted(back)]
    return after, sorted(held)


def only(coefficients: Tensor, clients: Sequence[int]) -> Tensor:
    """(m, N) the coefficients of these clients, 0 for all others."""
    kept = torch.zeros_like(coefficients)
    kept[:, list(clients)] = coefficients[:, list(clients)]
    return kept


def survivors_only(known: Tensor, coefficients: Tensor) -> Callable[[Sequence[int]], None]:
    """A check of who is left in a sum, before it is revealed.

    Args:
        known: (r, N) what the server was told so far.
        coefficients: (m, N) of the clients' statistics in the sums.
    """

    def check(survivors: Sequence[int]) -> None:
        exposed = determined(extended(known, only(coefficients, survivors)))
        if exposed:
            raise TooFewClients(f"the sum over clients {list(survivors)} would give away the data of {exposed}")

    return check
