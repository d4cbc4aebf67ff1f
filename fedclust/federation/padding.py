"""Batches of several clients in one tensor: padded rows, masks, and losses that leave padded rows out.

Where the batches of a step differ in their numbers of rows, all are padded to the largest, and the batch has beside
each entry `name` an entry `"mask/name"`: float32 (rows,), 1 for a row of the client and 0 for padding. Where all have
equally many rows there is no mask, and the functions below are PyTorch's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional as F

MASK = "mask/"
_stacked: ContextVar[bool] = ContextVar("stacked", default=False)


def mask_of(batch: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Which rows (n,) of a batch's entry are real; None if all are."""
    return batch.get(MASK + name)


def mean_over_rows(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of values (n, …) over the real rows and all else."""
    if mask is None:
        return values.mean()
    rows = values.reshape(len(values), -1)
    return (rows * mask.to(rows.dtype).unsqueeze(1)).sum() / (mask.sum() * rows.shape[1])


def mean_squared_error(values: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """`F.mse_loss` over the real rows."""
    return F.mse_loss(values, target) if mask is None else mean_over_rows((values - target).square(), mask)


def mean_cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor | None) -> Tensor:
    """`F.cross_entropy` over the real rows; logits (n, classes), labels (n,)."""
    if mask is None:
        return F.cross_entropy(logits, labels)
    return mean_over_rows(F.cross_entropy(logits, labels, reduction="none"), mask)


def channels_last(x: Tensor) -> Tensor:
    """Images in the channels_last layout, which convolutions of one client are faster in; others as they are."""
    if x.ndim != 4 or _stacked.get():
        return x
    return x.contiguous(memory_format=torch.channels_last)


@contextmanager
def stacked_clients() -> Iterator[None]:
    """Tells `channels_last` that clients are computed together, where PyTorch knows no such layout."""
    token = _stacked.set(True)
    try:
        yield
    finally:
        _stacked.reset(token)


def stack_batches(batches: Sequence[Mapping[str, Tensor]], who: Sequence[str]) -> tuple[dict[str, Tensor], RowCounts]:
    """Puts the batches of several clients into one, every entry (clients, rows, …), padded and masked where needed.

    Args:
        batches: One batch per client, with the same names.
        who: The clients' names, for messages.

    Returns:
        The batch, and per padded number of rows how many of them are real at every client (empty without masks).

    Raises:
        ValueError: If names, types or shapes (but for the rows) differ, or the module's own names start with "mask/".
    """
    first = batches[0]
    for batch, name in zip(batches, who, strict=True):
        if batch.keys() != first.keys():
            raise ValueError(
                f"batches of clients that train together need the same entries: {who[0]} has {sorted(first)}, "
                f"{name} has {sorted(batch)}"
            )
    if any(name.startswith(MASK) for name in first):
        raise ValueError(f"names of batch entries must not start with {MASK!r}, which is kept for masks")
    columns = {name: [batch[name] for batch in batches] for name in first}
    for name, column in columns.items():
        _check_column(name, column, who)
    counts = {name: tuple(map(len, column)) for name, column in columns.items() if column[0].ndim}
    if all(len(set(rows)) == 1 for rows in counts.values()):
        return {name: torch.stack(column) for name, column in columns.items()}, {}
    lengths = _padded_lengths(counts)
    stacked: dict[str, Tensor] = {}
    for name, column in columns.items():
        if name not in counts:
            stacked[name] = torch.stack(column)
            continue
        length = lengths[counts[name]]
        stacked[name] = torch.stack([pad_rows(rows, length) for rows in column])
        places = torch.arange(length, device=column[0].device)
        real = torch.tensor(counts[name], device=column[0].device).unsqueeze(1)
        stacked[MASK + name] = (places < real).float()
    return stacked, {length: rows for rows, length in lengths.items()}


RowCounts = dict[int, tuple[int, ...]]


def pad_rows(rows: Tensor, length: int) -> Tensor:
    """Rows (n, …) → (length, …): repeats the first row, so that padding is as finite as the data."""
    missing = length - len(rows)
    if not missing:
        return rows
    fill = rows[:1] if len(rows) else rows.new_zeros(1, *rows.shape[1:])
    return torch.cat([rows, fill.expand(missing, *rows.shape[1:])])


def _padded_lengths(counts: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """A length of its own for every pattern of real rows: BatchNorm tells by the length which mask is its input's."""
    lengths: dict[tuple[int, ...], int] = {}
    for rows in counts.values():
        length = max(rows)
        while rows not in lengths and length in lengths.values():
            length += 1
        lengths.setdefault(rows, length)
    return lengths


def _check_column(name: str, column: Sequence[Tensor], who: Sequence[str]) -> None:
    first = column[0]
    for value, client in zip(column, who, strict=True):
        if (value.dtype, value.shape[1:], value.ndim) != (first.dtype, first.shape[1:], first.ndim):
            raise ValueError(
                f"batch entry {name!r} of clients that train together must differ in the number of rows only: {who[0]} "
                f"has {first.dtype} {tuple(first.shape)}, {client} has {value.dtype} {tuple(value.shape)}"
            )
