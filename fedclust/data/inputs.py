"""Rows from outside, brought into the form that a trained model takes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.arrays import array_of
from fedclust.data.tables import SPLITS, ClientData, Scaling, Table


@dataclass(frozen=True)
class Inputs:
    """What a model was trained on.

    Attributes:
        shape: Shape of one row.
        n_classes: Number of classes, None without labels.
        scaling: The scaling fitted to the training data, or None.
        limits: Smallest and largest value of the training rows; None if that is not known.
        class_names: Name of each class, as labels came from the source; None if that is not known.
    """

    shape: tuple[int, ...]
    n_classes: int | None
    scaling: Scaling | None
    limits: tuple[float, float] | None = None
    class_names: list[str] | None = None

    def rows(self, x: Any) -> Tensor:
        """Rows (n, *shape), float32, scaled as the training data was.

        Args:
            x: (n, *shape), images also with the channels last, or flat (n, features) in the order of `shape`: uint8 is
                divided by 255 where no scaling is known. A `Table` is scaled already.

        Raises:
            ValueError: For another number of features, or values that are not finite.
        """
        if isinstance(x, Table):
            return x.x
        if isinstance(x, tuple | ClientData):
            raise ValueError(
                f"x must be an array of rows or a Table such as data.client(3).test, not a {type(x).__name__}; "
                "(rows, labels) and whole clients are for `assign`"
            )
        values = _numbers(array_of(x))
        features = int(np.prod(self.shape))
        if len(self.shape) == 3 and values.shape[1:] == (*self.shape[1:], self.shape[0]) != self.shape:
            values = np.moveaxis(values, 3, 1)
        same = values.shape[1:] == (features,) or _without_ones(values.shape[1:]) == _without_ones(self.shape)
        if values.ndim < 2 or not same:
            flat = f" or (n, {features})" if len(self.shape) > 1 else ""
            raise ValueError(f"x must have shape (n, {', '.join(map(str, self.shape))}){flat}, not {values.shape}")
        values = values.reshape(len(values), *self.shape)
        if self.scaling is not None:
            values = self.scaling.apply(values)
        elif values.dtype == np.uint8:
            values = np.divide(values, 255, dtype=np.float32)
        values = np.ascontiguousarray(values, dtype=np.float32)
        bad = ~np.isfinite(values.reshape(len(values), features)).all(axis=1)
        if bad.any():
            raise ValueError(f"{int(bad.sum())} rows of x hold NaN or infinite values, first row {int(bad.argmax())}")
        self._compare(values)
        return torch.from_numpy(values)

    def _compare(self, values: np.ndarray[Any, Any]) -> None:
        """Warns where values lie so far outside that they can hardly be scaled as the training rows were."""
        if self.limits is None or not len(values):
            return
        low, high = self.limits
        least, most = float(values.min()), float(values.max())
        if least < 2 * low - high or most > 2 * high - low:
            warnings.warn(
                f"x runs from {least:.4g} to {most:.4g}, the training rows from {low:.4g} to {high:.4g}: scale x as "
                "they were (images to [0, 1])",
                stacklevel=4,
            )

    def client(self, new_client: Any) -> ClientData:
        """A client's rows, all of them for training.

        Args:
            new_client: Rows, a pair (rows, labels as the source had them), a `Table` or a `ClientData`. Labels of the
                last two are indices into the class names that they carry, and are renumbered where those are others.

        Raises:
            ValueError: If rows or labels do not fit, or there is no row.
        """
        if isinstance(new_client, ClientData):
            data = replace(new_client, **{split: self._renumbered(getattr(new_client, split)) for split in SPLITS})
        else:
            x, y = new_client if isinstance(new_client, tuple) and len(new_client) == 2 else (new_client, None)
            table = self._renumbered(x) if isinstance(x, Table) else self._table(x, y)
            none = table.select(slice(0, 0))
            data = ClientData(table, none, none)
        if not len(data.train):
            raise ValueError("the new client has no row")
        return data

    def _renumbered(self, table: Table) -> Table:
        """A table whose class indices are the model's; another data module may have counted other classes."""
        if table.y is None or table.class_names is None or self.class_names is None or not len(table):
            return table
        if list(table.class_names) == self.class_names:
            return table
        names = np.array(table.class_names, dtype=object)[table.y.numpy()]
        return replace(table, y=self._labels(names, len(table)), class_names=tuple(self.class_names))

    def _table(self, x: Any, y: Any) -> Table:
        rows = self.rows(x)
        return Table(rows, None if y is None else self._labels(y, len(rows)), np.arange(len(rows)))

    def _labels(self, y: Any, n: int) -> Tensor:
        """Class indices of labels: by name, or, where names are words, by index too."""
        values = array_of(y)
        if values.shape != (n,) or values.dtype.kind not in "iufbUO":
            raise ValueError(
                f"labels must be {n} whole numbers or names, one per row, got {values.dtype} {values.shape}"
            )
        names = self.class_names or [str(index) for index in range(self.n_classes or 0)]
        index_of = {name: index for index, name in enumerate(names)}
        if not any(name.lstrip("-").isdigit() for name in names):
            index_of |= {str(index): index for index in range(len(names))}
        given, codes = np.unique(values.astype(str) if values.dtype.kind == "O" else values, return_inverse=True)
        found = [index_of.get(_label_name(value)) for value in given]
        unknown = [_label_name(value) for value, index in zip(given, found, strict=True) if index is None]
        if unknown:
            raise ValueError(f"labels must be among {', '.join(names)}, got {', '.join(unknown[:5])}")
        return torch.from_numpy(np.array(found, dtype=np.int64)[codes])


def _label_name(value: Any) -> str:
    """How `class_names` writes a label: whole numbers without a fraction, True and False as 1 and 0."""
    if isinstance(value, np.bool_ | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def _numbers(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values, if they are real numbers; objects (a table of several types) as float64 if they can be.

    Raises:
        ValueError: If they are something else.
    """
    if values.dtype.kind == "O":
        try:
            return values.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"x must hold real numbers: {error}") from error
    if values.dtype.kind not in "bfiu":
        raise ValueError(f"x must hold real numbers, not {values.dtype}")
    return values


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)
