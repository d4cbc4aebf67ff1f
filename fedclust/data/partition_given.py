"""Partitions that follow what is given: planted label groups, label-sorted shards, natural client ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedclust.checks import positive_int
from fedclust.data.partition_base import Partition
from fedclust.data.tables import IntArray, with_plain_strings
from fedclust.random import numpy_generator


class LabelGroups(Partition):
    """Planted groups of clients: the clients of one group share the same set of labels.

    Rows of a label are dealt at random and evenly to all clients whose group has that label.

    Args:
        groups: Class indices of each group, such as ``[[0, 1, 2], [3, 4]]``. A label may be in several groups; each
            label of the data must be in one at least.
        clients_per_group: Number of clients in every group. Clients are numbered group after group.

    Raises:
        ValueError: For bad arguments; from `split` when groups and labels of the data do not match, or a client would
            get no row.
    """

    needs_labels = True

    def __init__(self, groups: list[list[int]], clients_per_group: int = 1) -> None:
        if isinstance(groups, str) or not isinstance(groups, Sequence) or not groups:
            raise ValueError(f"groups must be a list of lists of class indices, got {groups!r}")
        checked: list[list[int]] = []
        for number, group in enumerate(groups):
            if isinstance(group, str) or not isinstance(group, Sequence) or not group:
                raise ValueError(f"groups[{number}] must be a list of at least one class index, got {group!r}")
            checked.append([positive_int(f"groups[{number}]", label, least=0) for label in group])
            if len(set(checked[-1])) != len(checked[-1]):
                raise ValueError(f"groups[{number}] names a label twice: {list(group)}")
        self.label_groups = checked
        self.clients_per_group = positive_int("clients_per_group", clients_per_group)
        self.n_clients = len(checked) * self.clients_per_group

    def _deal(self, labels: np.ndarray[Any, Any] | None, n: int, seed: int) -> list[np.ndarray[Any, Any]]:
        values = np.asarray(labels)
        present = {int(label) for label in np.unique(values)}
        named = {label for group in self.label_groups for label in group}
        if present - named:
            raise ValueError(f"LabelGroups: labels {sorted(present - named)} of the data are in no group")
        if named - present:
            raise ValueError(f"LabelGroups: labels {sorted(named - present)} are in a group but not in the data")
        rng = numpy_generator(seed, "partition")
        owner_group = np.repeat(np.arange(len(self.label_groups)), self.clients_per_group)
        parts: list[list[np.ndarray[Any, Any]]] = [[] for _ in range(self.n_clients)]
        for label in sorted(present):
            owners = [c for c in range(self.n_clients) if label in self.label_groups[owner_group[c]]]
            rows = rng.permutation(np.flatnonzero(values == label))
            for client, piece in zip(rng.permutation(owners), np.array_split(rows, len(owners)), strict=True):
                parts[client].append(piece)
        dealt = [np.concatenate(pieces) for pieces in parts]
        for client, rows in enumerate(dealt):
            if len(rows) == 0:
                raise ValueError(
                    f"LabelGroups: client {client} of group {owner_group[client]} would get no row; "
                    f"lower clients_per_group={self.clients_per_group}"
                )
        return dealt

    def groups(self) -> IntArray:
        """Number of the label group of each client."""
        return np.repeat(np.arange(len(self.label_groups), dtype=np.int64), self.clients_per_group)

    def describe(self) -> dict[str, Any]:
        """Class name and arguments."""
        args = {"groups": self.label_groups, "clients_per_group": self.clients_per_group}
        return {"class": "LabelGroups", "args": args}


class Shards(Partition):
    """Label skew by shards: rows sorted by label are cut into equal shards, each client is dealt some at random.

    With two shards per client most clients see two labels (McMahan et al. 2017, arXiv 1602.05629, Sec. 3).

    Args:
        n_clients: Number of clients, at least 1.
        shards_per_client: Shards that each client is dealt, at least 1; 1 gives clients with one label or nearly so.
    """

    needs_labels = True

    def __init__(self, n_clients: int, shards_per_client: int = 2) -> None:
        self.n_clients = positive_int("n_clients", n_clients)
        self.shards_per_client = positive_int("shards_per_client", shards_per_client)

    def _deal(self, labels: np.ndarray[Any, Any] | None, n: int, seed: int) -> list[np.ndarray[Any, Any]]:
        n_shards = self.n_clients * self.shards_per_client
        if n_shards > n:
            raise ValueError(
                f"Shards: {self.n_clients} clients x {self.shards_per_client} shards need at least {n_shards} rows, "
                f"got {n}"
            )
        rng = numpy_generator(seed, "partition")
        codes = np.unique(np.asarray(labels), return_inverse=True)[1]
        shuffled = rng.permutation(n)
        by_label = shuffled[np.argsort(codes[shuffled], kind="stable")]
        shards = np.array_split(by_label, n_shards)
        dealt = rng.permutation(n_shards).reshape(self.n_clients, self.shards_per_client)
        return [np.concatenate([shards[shard] for shard in hand]) for hand in dealt]


class Natural(Partition):
    """One client per distinct id: a writer, a hospital, a device, or one array of a list of arrays.

    Clients are numbered in the sorted order of their ids; the ids stay their names.

    Args:
        ids: One id per training row, whole numbers or strings; None takes the ids that the source brings.
    """

    def __init__(self, ids: Any = None) -> None:
        self.ids: np.ndarray[Any, Any] | None = None
        if ids is None:
            return
        self.ids = with_plain_strings(np.asarray(ids))
        if self.ids.ndim != 1 or len(self.ids) == 0 or self.ids.dtype.kind not in "iuU":
            raise ValueError(
                f"ids must be one whole number or string per row, got dtype {self.ids.dtype} and shape {self.ids.shape}"
            )
        self._unique, self._codes = np.unique(self.ids, return_inverse=True)

    def _known(self) -> np.ndarray[Any, Any]:
        if self.ids is None:
            raise ValueError(
                "Natural: no client ids. Give Natural(ids=[one per row]), or a source that brings ids: a list of "
                "arrays, an .npz with `ids`, or an image folder with one sub-folder per client"
            )
        return self.ids

    @property
    def n_clients(self) -> int:  # type: ignore[override]
        """Number of distinct ids."""
        self._known()
        return len(self._unique)

    def _deal(self, labels: np.ndarray[Any, Any] | None, n: int, seed: int) -> list[np.ndarray[Any, Any]]:
        if len(self._known()) != n:
            raise ValueError(f"Natural: {len(self._known())} ids for {n} rows")
        return [np.flatnonzero(self._codes == client) for client in range(self.n_clients)]

    def names(self) -> list[str]:
        """The ids themselves, as strings."""
        self._known()
        return [str(name) for name in self._unique]

    def for_source(self, ids: np.ndarray[Any, Any] | None) -> Partition:
        """Natural clients of the source's own ids; this object when the source has none."""
        return self if ids is None else Natural(ids)

    def describe(self) -> dict[str, Any]:
        """The ids are not repeated here: the record lists every client's name and rows anyway."""
        return {"class": "Natural", "args": {}}
