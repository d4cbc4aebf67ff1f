"""Ways to deal the rows of one data set to clients.

Every partition is a small object with `split(labels, seed)`: it returns one sorted array of row positions per client.
The arrays are disjoint, together they are exactly ``range(n)``, and the same seed gives the same arrays.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from fedclust.checks import positive_int
from fedclust.data.partition_base import Partition
from fedclust.data.partition_given import LabelGroups, Natural, Shards
from fedclust.data.tables import IntArray
from fedclust.random import numpy_generator

__all__ = ["Dirichlet", "Iid", "LabelGroups", "Natural", "Partition", "Shards"]


class Iid(Partition):
    """Rows dealt at random, in parts whose sizes differ by at most one.

    Args:
        n_clients: Number of clients, at least 1 and at most the number of rows.
    """

    def __init__(self, n_clients: int) -> None:
        self.n_clients = positive_int("n_clients", n_clients)

    def _deal(self, labels: np.ndarray[Any, Any] | None, n: int, seed: int) -> list[np.ndarray[Any, Any]]:
        if self.n_clients > n:
            raise ValueError(f"Iid: {self.n_clients} clients need at least {self.n_clients} rows, got {n}")
        return np.array_split(numpy_generator(seed, "partition").permutation(n), self.n_clients)


class Dirichlet(Partition):
    """Label skew: for each label, the clients' shares of its rows are drawn from a symmetric Dirichlet distribution.

    **A larger alpha means less skew**: alpha = 1000 is almost IID, 0.5 is the usual non-IID case, 0.01 gives most
    clients only one or two labels. Sizes of the clients vary too, the more so the smaller alpha is.
    (Protocol of Hsu et al. 2019, arXiv 1909.06335, as label-skew benchmarks use it.)

    Args:
        n_clients: Number of clients, at least 1.
        alpha: Concentration, a finite number above 0.
        min_size: Fewest rows of a client. Shares are drawn again until every client has them. 0 permits clients
            without rows; a data module lists them in a warning, and training skips them.
        max_draws: How often to draw before giving up with an error.

    Raises:
        ValueError: For arguments outside these ranges; from `split` when `min_size` cannot be reached.
    """

    needs_labels = True

    def __init__(self, n_clients: int, alpha: float, min_size: int = 1, max_draws: int = 1000) -> None:
        self.n_clients = positive_int("n_clients", n_clients)
        known = isinstance(alpha, numbers.Real) and not isinstance(alpha, bool)
        self.alpha = float(alpha) if known else math.nan
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(
                f"alpha must be a finite number above 0, got {alpha!r}. Smaller means more skew; for clients with one "
                "label each use LabelGroups or Shards(shards_per_client=1), for no skew use Iid"
            )
        self.min_size = positive_int("min_size", min_size, least=0)
        self.max_draws = positive_int("max_draws", max_draws)

    def _deal(self, labels: np.ndarray[Any, Any] | None, n: int, seed: int) -> list[np.ndarray[Any, Any]]:
        needed = self.n_clients * self.min_size
        if needed > n:
            raise ValueError(
                f"Dirichlet: {n} rows cannot give {self.n_clients} clients min_size={self.min_size} rows each: "
                f"{needed} rows are needed. Lower min_size or n_clients"
            )
        classes, codes, class_sizes = np.unique(np.asarray(labels), return_inverse=True, return_counts=True)
        rng = numpy_generator(seed, "partition")
        counts = self._draw_counts(class_sizes, rng)
        parts: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(self.n_clients)]
        for code in range(len(classes)):
            rows = rng.permutation(np.flatnonzero(codes == code))
            for client, piece in enumerate(np.split(rows, np.cumsum(counts[code])[:-1])):
                parts[client].append(piece)
        return [np.concatenate(pieces) for pieces in parts]

    def _draw_counts(self, class_sizes: np.ndarray[Any, Any], rng: np.random.Generator) -> IntArray:
        """Rows per (label, client), shape (C, n_clients), every row of a label dealt exactly once."""
        best = -1
        for _ in range(self.max_draws):
            shares = self._draw_shares(len(class_sizes), rng)
            cuts = np.rint(np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(np.int64)
            cuts[:, -1] = class_sizes
            counts: IntArray = np.diff(np.minimum(cuts, class_sizes[:, None]), axis=1, prepend=0)
            smallest = int(counts.sum(axis=0).min())
            if smallest >= self.min_size:
                return counts
            best = max(best, smallest)
        raise ValueError(
            f"Dirichlet: no draw in {self.max_draws} gave each of {self.n_clients} clients min_size={self.min_size} "
            f"rows at alpha={self.alpha}; the best draw's smallest client had {best}. Raise alpha, lower min_size or "
            "n_clients, or permit empty clients with min_size=0"
        )

    def _draw_shares(self, n_classes: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        """Shares of the clients for each label, shape (C, n_clients), rows sum to 1."""
        if self.alpha > 1e12:  # the gamma draws behind a Dirichlet overflow at huge values; shares are equal by then
            return np.full((n_classes, self.n_clients), 1.0 / self.n_clients)
        return rng.dirichlet(np.full(self.n_clients, self.alpha), size=n_classes)
