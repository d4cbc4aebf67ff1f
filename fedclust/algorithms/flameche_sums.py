"""Which changes of assignments FLAMECHE may add up in a protected sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedclust.federation.algorithm import Server
from fedclust.privacy.aggregation import NoSum, TooFewClients
from fedclust.privacy.exposure import determined, extended


def combinations(before: Tensor, after: Tensor, n_clusters: int) -> Tensor:
    """(S·K, N) float64: how often each client's statistics enter the sum of each slot, by old and new slots (S, N)."""
    slots = torch.arange(n_clusters)[None, :, None]
    counts = (after[:, None] == slots).double() - (before[:, None] == slots).double()
    return counts.flatten(0, 1)


def without_exposure(known: Tensor, before: Tensor, after: Tensor, n_clusters: int) -> tuple[Tensor, list[int]]:
    """The moves that leave every client's statistics undetermined by all sums together.

    One client after the other keeps its old slots until nobody is exposed: of the exposed ones that would move, else
    of all that would, the one without whose move the fewest are exposed.

    Args:
        known: (r, N) what the server was told so far; see `fedclust.privacy.exposure`.
        before: (S, N) slots that are counted; −1 for none.
        after: (S, N) slots that the clients would move to.
        n_clusters: K.

    Returns:
        The slots (S, N) to move to, and the clients that were held back.
    """

    def exposed(slots: Tensor) -> list[int]:
        return determined(extended(known, combinations(before, slots, n_clusters)))

    def without(slots: Tensor, client: int) -> Tensor:
        kept = slots.clone()
        kept[:, client] = before[:, client]
        return kept

    held: list[int] = []
    while found := exposed(after):
        movers = torch.nonzero((before != after).any(0)).flatten().tolist()
        if not movers:
            break  # nothing is added: what is exposed was so before
        candidates = [client for client in movers if client in found] or movers
        held.append(min(candidates, key=lambda client: len(exposed(without(after, client)))))
        after = without(after, held[-1])
    return after, sorted(held)


def warn_of_starts(server: Server, n_init: int) -> None:
    """Notes what the number of starts means with protected sums."""
    if n_init == 1:
        server.note("n_init is 1, as sums are protected; plain sums have 5 starts: compare with n_init=1 there too")
    else:
        server.note(
            f"n_init is {n_init}: with protected sums every start gives the server equations of its own, so that soon "
            "few clients may move; n_init=null (in Python None) takes one start"
        )


def only(coefficients: Tensor, clients: Sequence[int]) -> Tensor:
    """(m, N) the coefficients of these clients, 0 for all others."""
    kept = torch.zeros_like(coefficients)
    kept[:, list(clients)] = coefficients[:, list(clients)]
    return kept


def after_refusal(error: NoSum, known: Tensor, coefficients: Tensor | None = None) -> Tensor:
    """(r, N) what the server may know after a sum that was refused; by default one over all clients of the sum."""
    if not error.revealed:
        return known
    told = torch.ones(1, known.shape[1], dtype=known.dtype) if coefficients is None else coefficients
    return extended(known, only(told, error.revealed))


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
