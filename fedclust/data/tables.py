"""The plain containers that every room of the library reads: a table of rows, a source, one client's share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

IntArray = np.ndarray[Any, np.dtype[np.int64]]
Indices = slice | Tensor | IntArray | Sequence[int]


@dataclass(frozen=True)
class Table:
    """Rows of data in memory.

    Attributes:
        x: Inputs, float32, shape ``(n, *input_shape)``.
        y: Class indices 0..C-1, int64, shape ``(n,)``; None when the data has no labels.
        rows: Row numbers in the source's own table, int64, shape ``(n,)``.
        class_names: Name of each class index in the source; None where that is not known.

    Raises:
        ValueError: If a field has the wrong type or the fields differ in length.
    """

    x: Tensor
    y: Tensor | None
    rows: IntArray
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.x, Tensor) or self.x.dtype != torch.float32 or self.x.ndim < 2:
            found = f"{self.x.dtype} {tuple(self.x.shape)}" if isinstance(self.x, Tensor) else type(self.x).__name__
            raise ValueError(f"Table.x must be a float32 tensor of shape (n, ...), got {found}")
        if not isinstance(self.rows, np.ndarray) or self.rows.dtype != np.int64 or self.rows.shape != (len(self.x),):
            raise ValueError(f"Table.rows must be int64 row numbers, one for each of the {len(self.x)} rows of x")
        if self.y is not None and (self.y.dtype != torch.int64 or tuple(self.y.shape) != (len(self.x),)):
            raise ValueError(
                f"Table.y must be int64 class indices, one for each of the {len(self.x)} rows of x, "
                f"got {self.y.dtype} {tuple(self.y.shape)}"
            )

    def __len__(self) -> int:
        return len(self.x)

    def select(self, indices: Indices) -> Table:
        """The rows at these positions, in this order. A slice gives views that share memory; all else copies."""
        if isinstance(indices, slice):
            labels = None if self.y is None else self.y[indices]
            return Table(self.x[indices], labels, self.rows[indices], self.class_names)
        positions = np.asarray(indices, dtype=np.int64)
        where = torch.from_numpy(positions)
        labels = None if self.y is None else self.y[where]
        return Table(self.x[where], labels, self.rows[positions], self.class_names)


@dataclass(frozen=True)
class Scaling:
    """The change from raw inputs to the ones that are learnt from: ``(x - shift) / width`` per feature.

    Attributes:
        shift: float64, shape ``input_shape``.
        width: float64, shape ``input_shape``, never 0.
    """

    shift: np.ndarray[Any, Any]
    width: np.ndarray[Any, Any]

    def apply(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Scales rows ``(n, *input_shape)``; float32."""
        return ((x - self.shift) / self.width).astype(np.float32)


@dataclass(frozen=True)
class Source:
    """A data set before it is dealt to clients.

    Attributes:
        name: Short name, used in records and tables.
        train: Rows that will be dealt to the clients (their validation shares are taken from these).
        test: Rows kept for the final figures; None lets `FederatedDataModule` hold out a share of `train`.
        class_names: Name of each class index, or None without labels.
        ids: Natural client of each train row, shape ``(n_train,)``, or None.
        test_ids: Natural client of each test row, or None.
        one_table: True when train and test rows are numbered in one common table (the test rows were held out).
        scaling: How raw inputs were scaled, or None if they were taken as they are (uint8 divided by 255).
        encoder: For the record, what the rows are features of (see `fedclust.Encoded`), as plain values; None if they
            are the data itself.
    """

    name: str
    train: Table
    test: Table | None
    class_names: list[str] | None = None
    ids: np.ndarray[Any, Any] | None = None
    test_ids: np.ndarray[Any, Any] | None = None
    one_table: bool = False
    scaling: Scaling | None = None
    encoder: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        pairs = [("ids", self.ids, self.train)]
        if self.test is not None:
            pairs.append(("test_ids", self.test_ids, self.test))
            if self.test.x.shape[1:] != self.train.x.shape[1:]:
                raise ValueError(
                    f"{self.name}: train rows have shape {tuple(self.train.x.shape[1:])} "
                    f"but test rows {tuple(self.test.x.shape[1:])}"
                )
            if (self.test.y is None) != (self.train.y is None):
                raise ValueError(f"{self.name}: train and test must both have labels, or neither")
        for field, ids, table in pairs:
            if ids is not None and len(ids) != len(table):
                raise ValueError(f"{self.name}: {field} has {len(ids)} entries for {len(table)} rows")
        self._check_classes()

    def _check_classes(self) -> None:
        """Labels must be indices into class_names (where these are given)."""
        if self.class_names is None:
            return
        for part, table in (("train", self.train), ("test", self.test)):
            if table is None or table.y is None or len(table) == 0:
                continue
            low, high = int(table.y.min()), int(table.y.max())
            if low < 0 or high >= len(self.class_names):
                raise ValueError(
                    f"{self.name}: {part} labels run from {low} to {high}, allowed 0 to {len(self.class_names) - 1} "
                    f"({len(self.class_names)} class names)"
                )


SPLITS = ("train", "val", "test")


def with_plain_strings(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of string objects, such as a pandas column, as an array of strings; any other stays as it is."""
    if values.dtype.kind == "O" and all(isinstance(value, str) for value in values.ravel()):
        return values.astype(str)
    return values


@dataclass(frozen=True)
class ClientData:
    """One client's three tables: `train` to learn from, `val` for monitors and tuning, `test` for final figures."""

    train: Table
    val: Table
    test: Table
