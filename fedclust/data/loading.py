"""Loaders over a pooled table, for runs of a client module under a plain Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fedclust.checks import positive_int
from fedclust.data.tables import Table
from fedclust.random import torch_generator


def batch_bounds(n: int, batch_size: int) -> list[tuple[int, int]]:
    """Where the batches of `n` rows start and stop.

    The last batch may be smaller, so fewer rows than `batch_size` make one batch of all of them. A last batch of a
    single row is merged into the one before it, because BatchNorm has no statistics of one row.
    """
    starts = list(range(0, n, batch_size))
    if batch_size > 1 and len(starts) > 1 and n - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], n], strict=True)) if starts else []


class PooledRows(Dataset[dict[str, Tensor]]):
    """A table as a dataset that is asked for whole batches: a list of positions in, a dict of tensors out."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, positions: Sequence[int]) -> dict[str, Tensor]:
        index = torch.as_tensor(np.asarray(positions, dtype=np.int64))
        batch = {"x": self.table.x[index], "index": index}
        if self.table.y is not None:
            batch["y"] = self.table.y[index]
        return batch


class RowBatches(Sampler[list[int]]):
    """Lists of positions, each row once per pass; shuffled anew in every pass when a seed is given.

    The order of a pass is a function of (seed, epoch) alone, so that a resumed run goes on as an uninterrupted one.
    A Trainer calls `set_epoch`; without it the passes are counted. See `batch_bounds` for the last batch.

    Args:
        n: Number of rows.
        batch_size: Rows per batch, at least 1.
        seed: Seed of the order; None keeps the rows in order.
    """

    def __init__(self, n: int, batch_size: int, seed: int | None = None) -> None:
        self.n = n
        self.batch_size = positive_int("batch_size", batch_size)
        self.seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Says which pass comes next."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(batch_bounds(self.n, self.batch_size))

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self.n)
        if self.seed is not None:
            order = torch.randperm(self.n, generator=torch_generator(self.seed, self._epoch, "train loader"))
        self._epoch += 1
        for start, stop in batch_bounds(self.n, self.batch_size):
            yield order[start:stop].tolist()


def pooled_loader(table: Table, batch_size: int, *, seed: int | None = None) -> DataLoader[Any]:
    """Loader of dict batches ``{"x", "y" (with labels), "index"}``; index is the row's position in `table`.

    Args:
        table: The pooled rows.
        batch_size: Rows per batch.
        seed: Shuffles every pass by this seed; None keeps the order.
    """
    return DataLoader(PooledRows(table), sampler=RowBatches(len(table), batch_size, seed), batch_size=None)


class Steps:
    """A list of steps as one loader; the Trainer would take a plain list of tuples for several loaders."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self._steps = list(steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._steps)
