"""Which rows make up a batch: shuffled epochs over tensors in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedclust.data.loading import batch_bounds


def shuffled_batches(n_rows: int, batch_size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yields one epoch of row indices in random order, cut as `fedclust.data.loading.batch_bounds` says.

    Args:
        n_rows: Number of rows.
        batch_size: Rows per batch, at least 1.
        generator: CPU generator of the permutation.

    Yields:
        int64 index tensors whose union is 0..n_rows-1.
    """
    order = torch.randperm(n_rows, generator=generator)
    for start, stop in batch_bounds(n_rows, batch_size):
        yield order[start:stop]


def gathered(*parts: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rows of one or several tables below each other, each copied once.

    Args:
        *parts: Table (n, …) and int64 indices (m,) into it; all tables have the same width, type and device. Indices
            may lie on the CPU.
    """
    table, first = parts[0]
    if len(parts) == 1:
        index = first.to(table.device)
        return table.index_select(0, index) if table.is_contiguous() else table[index]  # which keeps channels-last
    counts = [len(rows) for _, rows in parts]
    out = table.new_empty((sum(counts), *table.shape[1:]))
    for place, (source, rows) in zip(torch.split(out, counts), parts, strict=True):
        torch.index_select(source, 0, rows.to(source.device), out=place)
    return out


class Cycle:
    """Draws any number of row indices from an endless sequence of shuffled passes.

    Args:
        n_rows: Number of rows, at least 1.
        generator: CPU generator of the permutations.
    """

    def __init__(self, n_rows: int, generator: torch.Generator) -> None:
        if n_rows < 1:
            raise ValueError(f"cannot draw from {n_rows} rows")
        self._n_rows = n_rows
        self._generator = generator
        self._rest = torch.empty(0, dtype=torch.int64)

    def take(self, count: int) -> torch.Tensor:
        """The next `count` indices (int64); rows repeat only after all others were drawn."""
        while len(self._rest) < count:
            fresh = torch.randperm(self._n_rows, generator=self._generator)
            self._rest = torch.cat([self._rest, fresh])
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken
