"""Deal a source to clients: row positions per client, then tables in client order."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedclust.data.partition import Dirichlet, Iid, Natural, Partition
from fedclust.data.shares import holdout, label_entropies, matching_test_parts
from fedclust.data.tables import ClientData, IntArray, Scaling, Source, Table
from fedclust.data.transforms import ClientTransform
from fedclust.random import numpy_generator


@dataclass(frozen=True)
class Pool:
    """The rows of all clients in client order; client i owns positions ``bounds[i]`` up to ``bounds[i + 1]``."""

    table: Table
    bounds: tuple[int, ...]

    def of(self, client: int) -> Table:
        """One client's rows, as views into the pooled table."""
        return self.table.select(slice(self.bounds[client], self.bounds[client + 1]))

    def sizes(self) -> list[int]:
        """Number of rows of each client."""
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]


@dataclass(frozen=True)
class Deal:
    """What came of dealing one source to clients.

    Attributes:
        name: Name of the source.
        class_names: Name of each class index, or None.
        n_classes: Number of classes, or None without labels.
        partition: The partition, completed with the source's ids.
        train, val, test: Pooled rows in client order.
        groups: Planted group per client, or None.
        entropies: Entropy in nats of each client's labels (train and val together, before any label swap), None for an
            empty client; None as a whole without labels.
        one_table: True when test rows are numbered in the same table as train rows.
        scaling: How raw inputs were scaled, or None.
        encoder: What the rows are features of, or None.
    """

    name: str
    class_names: list[str] | None
    n_classes: int | None
    partition: Partition
    train: Pool
    val: Pool
    test: Pool
    groups: IntArray | None
    entropies: list[float | None] | None
    one_table: bool
    scaling: Scaling | None
    encoder: dict[str, Any] | None

    def client(self, client: int) -> ClientData:
        """One client's three tables."""
        return ClientData(self.train.of(client), self.val.of(client), self.test.of(client))

    def empty_clients(self) -> list[int]:
        """Clients without a training row."""
        return [client for client, size in enumerate(self.train.sizes()) if size == 0]


def deal_source(
    source: Source, partition: Partition | None, transform: ClientTransform | None, seed: int, val_fraction: float
) -> Deal:
    """Deal the rows of a source.

    Args:
        source: The data, with a test part.
        partition: None: natural clients if the source has ids, else Dirichlet(5, 0.5) with a twentieth of the rows
            as min_size, or Iid(5) without labels.
        transform: Change per client, or None.
        seed: Seed of the partition, the validation shares and the test parts.
        val_fraction: Share of each client's rows that becomes its validation part.

    Raises:
        ValueError: If partition or transform do not fit the data, or the source has no test part.
    """
    if source.test is None:
        raise ValueError(f"{source.name}: no test part")
    n_classes = _count_classes(source)
    if transform is not None:
        transform.check(tuple(source.train.x.shape[1:]), n_classes)
    partition = (partition or _default_partition(source)).for_source(source.ids)
    labels = None if source.train.y is None else source.train.y.numpy()
    parts = partition.split(labels, seed, n_rows=len(source.train))
    _warn_of_empty_clients(parts)
    if source.ids is not None and not isinstance(partition, Natural):
        warnings.warn(
            f"{source.name} says which client each row belongs to, but {type(partition).__name__} deals the rows anew; "
            "partition=None (--data.partition null) or Natural keeps them",
            stacklevel=2,
        )
    train_parts, val_parts = _take_validation(labels, parts, val_fraction, seed)
    test_parts = _test_parts(source, partition, labels, parts, seed)
    return Deal(
        name=source.name,
        class_names=source.class_names,
        n_classes=n_classes,
        partition=partition,
        train=_pool(source.train, train_parts, transform),
        val=_pool(source.train, val_parts, transform),
        test=_pool(source.test, test_parts, transform),
        groups=_planted_groups(partition, transform),
        entropies=None if labels is None else label_entropies(labels, parts),
        one_table=source.one_table,
        scaling=source.scaling,
        encoder=source.encoder,
    )


def _count_classes(source: Source) -> int | None:
    if source.train.y is None:
        return None
    if source.class_names is not None:
        return len(source.class_names)
    highest = [int(table.y.max()) for table in (source.train, source.test) if table and table.y is not None]
    return max(highest) + 1


def _default_partition(source: Source) -> Partition:
    if source.ids is not None:
        return Natural()
    if source.train.y is None:
        return Iid(n_clients=5)
    # At least a quarter of an equal share: a client of one row could not be clustered.
    return Dirichlet(n_clients=5, alpha=0.5, min_size=max(1, len(source.train) // 20))


def _warn_of_empty_clients(parts: Sequence[IntArray]) -> None:
    empty = [client for client, part in enumerate(parts) if len(part) == 0]
    if empty:
        warnings.warn(f"clients {empty} of {len(parts)} have no rows (min_size=0 permits this)", stacklevel=2)


def _take_validation(
    labels: np.ndarray[Any, Any] | None, parts: Sequence[IntArray], val_fraction: float, seed: int
) -> tuple[list[IntArray], list[IntArray]]:
    """Split each client's rows into (train, val); a client keeps at least one training row."""
    train: list[IntArray] = []
    val: list[IntArray] = []
    for client, part in enumerate(parts):
        own = None if labels is None else labels[part]
        picked = holdout(own, len(part), val_fraction, numpy_generator(seed, client, "val"))
        val.append(part[picked])
        train.append(np.delete(part, picked))
    return train, val


def _test_parts(
    source: Source,
    partition: Partition,
    labels: np.ndarray[Any, Any] | None,
    parts: Sequence[IntArray],
    seed: int,
) -> list[IntArray]:
    """Natural clients keep their own test rows; all others get rows in proportion to what they train on."""
    assert source.test is not None
    if not isinstance(partition, Natural) or source.test_ids is None:
        test_labels = None if source.test.y is None or labels is None else source.test.y.numpy()
        return matching_test_parts(labels, parts, test_labels, seed, n_test=len(source.test))
    names = partition.names()
    owners = np.array([str(name) for name in source.test_ids])
    unknown = sorted(set(owners.tolist()) - set(names))
    if unknown:
        raise ValueError(f"{source.name}: clients {unknown} have test rows but no training rows")
    return [np.flatnonzero(owners == name).astype(np.int64) for name in names]


def _pool(table: Table, parts: Sequence[IntArray], transform: ClientTransform | None) -> Pool:
    """Copy the rows into client order, then change them client by client in place."""
    bounds = tuple(np.cumsum([0, *(len(part) for part in parts)]).tolist())
    pool = Pool(table.select(np.concatenate(parts)), bounds)
    if transform is None:
        return pool
    for client in range(len(parts)):
        own = pool.of(client)
        changed = transform.apply(client, own)
        if changed.x.shape != own.x.shape:
            raise ValueError(
                f"client {client}: the transform changed the shape of its rows from {tuple(own.x.shape)} "
                f"to {tuple(changed.x.shape)}"
            )
        own.x.copy_(changed.x)
        if own.y is not None and changed.y is not None:
            own.y.copy_(changed.y)
    return pool


def _planted_groups(partition: Partition, transform: ClientTransform | None) -> IntArray | None:
    """Groups of the partition, of the transform, or of both crossed and numbered from 0 without gaps."""
    dealt = partition.groups()
    changed = None if transform is None else transform.groups(partition.n_clients)
    if dealt is None or changed is None:
        return changed if dealt is None else dealt
    crossed = np.unique(np.stack([dealt, changed], axis=1), axis=0, return_inverse=True)[1]
    return crossed.reshape(-1).astype(np.int64)
