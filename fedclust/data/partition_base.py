"""The contract of every partition: `split(labels, seed)` gives each client its row positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedclust.checks import positive_int, seed_value
from fedclust.data.tables import IntArray
from fedclust.described import Described


class Partition(Described, ABC):
    """Base class of all partitions. `n_clients` is the number of clients that `split` returns."""

    n_clients: int
    needs_labels = False

    def split(
        self, labels: np.ndarray[Any, Any] | Sequence[Any] | None, seed: int, *, n_rows: int | None = None
    ) -> list[IntArray]:
        """Deal the rows to the clients.

        Args:
            labels: One label per row, shape ``(n,)``; None for data without labels (then `n_rows` is needed).
            seed: Seed of the draw; the same seed gives the same parts.
            n_rows: Number of rows; may be left out when labels are given.

        Returns:
            One sorted int64 array of row positions per client: disjoint, and together ``range(n)``.

        Raises:
            ValueError: If labels are needed but missing, if labels and `n_rows` disagree, or if the rows do not
                suffice for the clients.
        """
        name = type(self).__name__
        seed = seed_value(f"{name}: seed", seed)
        values = None if labels is None else np.asarray(labels)
        if values is not None and values.ndim != 1:
            raise ValueError(f"{name}: labels must be one per row, got shape {values.shape}")
        if values is not None and n_rows is not None and len(values) != n_rows:
            raise ValueError(f"{name}: {len(values)} labels for {n_rows} rows")
        if values is None and self.needs_labels:
            raise ValueError(
                f"partition: {name} deals rows by label, but the data has no labels; use Iid(n_clients), or Natural "
                "where rows have owners; partition=None (--data.partition null) chooses between them"
            )
        if values is not None and values.dtype.kind == "f" and np.isnan(values).any():
            raise ValueError(f"{name}: {int(np.isnan(values).sum())} of {len(values)} labels are NaN")
        n = n_rows if values is None else len(values)
        if n is None:
            raise ValueError(f"{name}: without labels, give n_rows")
        n = positive_int(f"{name}: n_rows", n)
        return [np.sort(part).astype(np.int64) for part in self._deal(values, n, seed)]

    @abstractmethod
    def _deal(self, labels: np.ndarray[Any, Any] | None, n: int, seed: int) -> list[np.ndarray[Any, Any]]:
        """The parts in any order; arguments are checked already."""

    def groups(self) -> IntArray | None:
        """Planted group of each client, shape ``(n_clients,)``, or None when the partition plants no groups."""
        return None

    def names(self) -> list[str]:
        """Name of each client; the client's number unless the data brings names."""
        return [str(client) for client in range(self.n_clients)]

    def for_source(self, ids: np.ndarray[Any, Any] | None) -> Partition:
        """This partition, completed by what only the source knows (its natural client ids)."""
        return self
