"""Which clients take part in a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite

from fedclust.random import numpy_generator


@dataclass(frozen=True)
class Cohorts:
    """Draws cohorts as a function of (seed, round) alone.

    Args:
        cohort_size: Clients per round; None takes all, or `participation`.
        participation: Share of the clients per round in (0, 1]; None takes all.

    Raises:
        ValueError: If both are given, or one is out of range.
    """

    cohort_size: int | None = None
    participation: float | None = None

    def __post_init__(self) -> None:
        size, share = self.cohort_size, self.participation
        if size is not None and share is not None:
            raise ValueError(f"give cohort_size or participation, not both ({size} and {share})")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"cohort_size must be a positive integer, not {size!r}")
        if share is not None and not (isfinite(share) and 0 < share <= 1):
            raise ValueError(f"participation must lie in (0, 1], not {share!r}")

    def check(self, n_clients: int) -> None:
        """Raises ValueError if there are fewer clients than a cohort needs."""
        if n_clients < 1:
            raise ValueError("no client holds any training row")
        if self.cohort_size is not None and self.cohort_size > n_clients:
            raise ValueError(f"cohort_size is {self.cohort_size}, but only {n_clients} clients hold training rows")

    def size(self, n_clients: int) -> int:
        """Number of clients in a round."""
        if self.participation is not None:
            return min(n_clients, max(1, int(self.participation * n_clients + 0.5)))
        return n_clients if self.cohort_size is None else min(n_clients, self.cohort_size)

    def draw(self, clients: list[int], seed: int, round: int) -> list[int]:
        """The cohort of a round, ascending ids."""
        size = self.size(len(clients))
        if size == len(clients):
            return list(clients)
        chosen = numpy_generator(seed, round, "cohort").choice(len(clients), size, replace=False)
        return sorted(clients[i] for i in chosen)


class Rounds:
    """An endless supply of cohorts for a Trainer, one per epoch.

    Args:
        draw: Gives the cohort of the round that begins.
    """

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[int]]:
        yield self._draw()
