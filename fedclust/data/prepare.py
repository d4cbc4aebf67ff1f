"""From raw arrays to a `Source`: layout, finite check, labels, hold-out, scaling. The one place where values change.

Scaling, `scale="auto"`: uint8 values are divided by 255; floats are taken as they are, with a warning when they leave
[0, 1]. `"minmax"` maps every feature to [0, 1] and `"standard"` to mean 0 and standard deviation 1, both with the
statistics of the pooled training rows, the later validation rows among them (test values may leave [0, 1]); a constant
feature becomes 0. `"none"` changes nothing. The result is float32, the same for ``(n, 28, 28)``, ``(n, 1, 28, 28)`` and
flat ``(n, 784)`` inputs.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.data.shares import holdout
from fedclust.data.tables import Scaling, Source, Table, with_plain_strings
from fedclust.random import numpy_generator

AnyArray = np.ndarray[Any, Any]
SCALES = ("auto", "minmax", "standard", "none")
LAYOUTS = ("auto", "channels_first", "channels_last")
_HOLDOUT_SEED = 0  # fixed, so that runs with different seeds report on the same test rows


@dataclass(frozen=True)
class RawData:
    """Arrays as a reader found them: `x` (n, ...), labels of any whole-number or string type, natural client ids."""

    name: str
    x: AnyArray
    y: AnyArray | None = None
    x_test: AnyArray | None = None
    y_test: AnyArray | None = None
    ids: AnyArray | None = None
    test_ids: AnyArray | None = None
    class_names: list[str] | None = None  # of labels that are 0..C-1 already


def build_source(raw: RawData, *, scale: str = "auto", layout: str = "auto", test_fraction: float = 0.2) -> Source:
    """Check raw arrays and bring them into the library's form.

    Args:
        raw: Arrays from a reader.
        scale: "auto", "minmax", "standard" or "none"; see the module's text.
        layout: Where 4-D images have their channels: "channels_first" (n, C, H, W), "channels_last" (n, H, W, C), or
            "auto": first when axis 1 has length 1 or 3, else last when axis 3 has length 1 or 3, else first. 3-D input
            (n, H, W) gets one channel; flat (n, d) stays flat.
        test_fraction: Share of rows held out as test part when `raw` has none; the same rows for every seed.

    Raises:
        ValueError: For arrays that do not fit together, values that are not finite, or unusable labels.
    """
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    raw = replace(raw, ids=_client_ids(raw.name, raw.ids), test_ids=_client_ids(raw.name, raw.test_ids))
    x = _inputs(raw.name, "train", raw.x, layout, raw.ids)
    x_test = None if raw.x_test is None else _inputs(raw.name, "test", raw.x_test, layout, raw.test_ids)
    if (raw.y is None) != (raw.y_test is None) and x_test is not None:
        raise ValueError(f"{raw.name}: train and test must both have labels, or neither")
    owners = (raw.ids, raw.test_ids)
    y, y_test, class_names = encode_labels(raw.name, raw.y, raw.y_test, raw.class_names, owners)
    _check_length(raw.name, "labels", y, len(x))
    _check_length(raw.name, "client ids", raw.ids, len(x))
    if x_test is not None:
        _check_length(raw.name, "test labels", y_test, len(x_test))
        _check_length(raw.name, "test client ids", raw.test_ids, len(x_test))
        if x_test.shape[1:] != x.shape[1:]:
            raise ValueError(f"{raw.name}: train rows have shape {x.shape[1:]} but test rows {x_test.shape[1:]}")
        train, test = np.arange(len(x)), np.arange(len(x_test))
        test_ids = raw.test_ids
    else:
        train, test = hold_out_test(raw.name, y, len(x), raw.ids, test_fraction)
        x_test, y_test = x[test], None if y is None else y[test]
        x, y = (x, y) if len(test) == 0 else (x[train], None if y is None else y[train])
        test_ids = None if raw.ids is None else raw.ids[test]
    train_x, test_x, scaling = scale_inputs(raw.name, x, x_test, scale)
    return Source(
        name=raw.name,
        train=_table(train_x, y, train, class_names),
        test=_table(test_x, y_test, test, class_names),
        class_names=class_names,
        ids=None if raw.ids is None else raw.ids[train],
        test_ids=test_ids,
        one_table=raw.x_test is None,
        scaling=scaling,
    )


def hold_out_test(
    name: str, y: AnyArray | None, n: int, ids: AnyArray | None, test_fraction: float
) -> tuple[AnyArray, AnyArray]:
    """Row positions (train, test) of a fixed split: by label in proportion, and within each natural client."""
    rng = numpy_generator(_HOLDOUT_SEED, "test split")
    if ids is None:
        test = holdout(y, n, test_fraction, rng)
    else:
        pieces = [np.empty(0, dtype=np.int64)]
        for client in np.unique(ids):
            rows = np.flatnonzero(ids == client)
            pieces.append(rows[holdout(None if y is None else y[rows], len(rows), test_fraction, rng)])
        test = np.sort(np.concatenate(pieces))
    return np.setdiff1d(np.arange(n), test), test


def with_test_part(source: Source, test_fraction: float) -> Source:
    """The source with a fixed share of its training rows moved into a test part."""
    y = None if source.train.y is None else source.train.y.numpy()
    train, test = hold_out_test(source.name, y, len(source.train), source.ids, test_fraction)
    return replace(
        source,
        train=source.train.select(train),
        test=source.train.select(test),
        ids=None if source.ids is None else source.ids[train],
        test_ids=None if source.ids is None else source.ids[test],
        one_table=True,
    )


def encode_labels(
    name: str,
    y: AnyArray | None,
    y_test: AnyArray | None,
    class_names: list[str] | None = None,
    owners: tuple[AnyArray | None, AnyArray | None] = (None, None),
) -> tuple[AnyArray | None, AnyArray | None, list[str] | None]:
    """Map whole-number or string labels to 0..C-1 in sorted order; returns (y, y_test, class names).

    With `class_names` the labels are indices into them already and stay as they are; `owners`, the client ids of both
    parts, are for messages.

    Raises:
        ValueError: If labels are not one per row, or neither whole numbers nor strings.
    """
    if y is None:
        return None, None, None
    given = [y] if y_test is None else [y, y_test]
    parts = [_label_values(name, values, ids) for values, ids in zip(given, owners, strict=False)]
    if len({part.dtype.kind == "U" for part in parts}) > 1:
        raise ValueError(f"{name}: train labels are {parts[0].dtype}, test labels {parts[1].dtype}")
    if class_names is not None:
        return parts[0].astype(np.int64), None if y_test is None else parts[1].astype(np.int64), class_names
    classes, codes = np.unique(np.concatenate(parts), return_inverse=True)
    codes = codes.astype(np.int64)
    names = [str(value) for value in classes]
    return codes[: len(parts[0])], None if y_test is None else codes[len(parts[0]) :], names


def _label_values(name: str, y: AnyArray, ids: AnyArray | None) -> AnyArray:
    if y.ndim != 1:
        raise ValueError(f"{name}: labels must be one per row, shape (n,), got shape {y.shape}")
    y = with_plain_strings(y)
    if y.dtype.kind == "b":
        return y.astype(np.int64)
    if y.dtype.kind == "f":
        if not np.isfinite(y).all() or (y != np.floor(y)).any():
            bad = int(np.flatnonzero(~np.isfinite(y) | (y != np.floor(y)))[0])
            raise ValueError(f"{name}: labels must be whole numbers or strings; {_place(bad, ids)} has {y[bad]}")
        return y.astype(np.int64)
    if y.dtype.kind not in "iuU":
        raise ValueError(f"{name}: labels must be whole numbers or strings, got dtype {y.dtype}")
    return y


def _client_ids(name: str, ids: AnyArray | None) -> AnyArray | None:
    if ids is None:
        return None
    ids = with_plain_strings(ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iuU":
        raise ValueError(
            f"{name}: client ids must be whole numbers or strings, one per row, got {ids.dtype} of shape {ids.shape}"
        )
    return ids


def _check_length(name: str, what: str, values: AnyArray | None, n: int) -> None:
    if values is not None and len(values) != n:
        raise ValueError(f"{name}: {len(values)} {what} for {n} rows")


def _inputs(name: str, part: str, x: AnyArray, layout: str, ids: AnyArray | None) -> AnyArray:
    """Checked inputs with channels first; `ids` are for messages."""
    if x.dtype.kind not in "bfiu":
        raise ValueError(f"{name}: {part} inputs must be numbers, got dtype {x.dtype}")
    if x.ndim < 2:
        raise ValueError(f"{name}: {part} inputs must have shape (n, features...), got {x.shape}")
    if len(x) == 0 and part == "train":
        raise ValueError(f"{name}: no training rows")
    if 0 in x.shape[1:]:
        raise ValueError(f"{name}: {part} inputs have no features, shape {x.shape}")
    if x.dtype.kind == "f":
        usable = np.abs(x) <= np.finfo(np.float32).max  # False for NaN too
        bad = ~usable.reshape(len(x), -1).all(axis=1)
        if bad.any():
            raise ValueError(
                f"{name}: {int(bad.sum())} {part} rows hold values that are not finite in float32 (NaN or infinity), "
                f"the first is {_place(int(np.flatnonzero(bad)[0]), ids)}; remove or fill them"
            )
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and _channels_are_last(x, layout):
        return np.moveaxis(x, 3, 1)
    return x


def _place(row: int, ids: AnyArray | None) -> str:
    """A row in words; where rows have owners, counted within its client."""
    if ids is None or row >= len(ids):
        return f"row {row}"
    return f"row {int((ids[:row] == ids[row]).sum())} of client {ids[row]}"


def _channels_are_last(x: AnyArray, layout: str) -> bool:
    if layout == "auto":
        return x.shape[1] not in (1, 3) and x.shape[3] in (1, 3)
    return layout == "channels_last"


def scale_inputs(name: str, x: AnyArray, x_test: AnyArray, scale: str) -> tuple[AnyArray, AnyArray, Scaling | None]:
    """Scale train and test inputs to float32; see the module's text. Statistics come from `x` alone."""
    if scale in ("minmax", "standard"):
        wide = x.astype(np.float64)
        shift = wide.min(axis=0) if scale == "minmax" else wide.mean(axis=0)
        width = wide.max(axis=0) - shift if scale == "minmax" else wide.std(axis=0)
        width[width < 1e-12] = 1.0
        scaling = Scaling(shift, width)
        return scaling.apply(wide), scaling.apply(x_test), scaling
    if scale == "auto" and x.dtype == np.uint8:
        if x_test.dtype != np.uint8:
            raise ValueError(f"{name}: train inputs are uint8, test inputs {x_test.dtype}; give both in one type")
        return np.divide(x, 255, dtype=np.float32), np.divide(x_test, 255, dtype=np.float32), None
    scaled, scaled_test = x.astype(np.float32), x_test.astype(np.float32)
    low, high = float(scaled.min()), float(scaled.max())
    if scale == "auto" and (low < 0.0 or high > 1.0):
        warnings.warn(
            f"{name}: inputs run from {low:.4g} to {high:.4g} and are taken as they are. Networks train best on inputs "
            'of about [0, 1], and a DCN whose decoder ends in a sigmoid cannot reproduce others: use scale="standard" '
            'or scale="minmax", for a DCN output="linear" (scale="none" silences this warning)',
            stacklevel=2,
        )
    # Recorded, so that a prediction on raw bytes does not divide them by 255.
    as_they_are = Scaling(np.zeros(x.shape[1:]), np.ones(x.shape[1:])) if x.dtype == np.uint8 else None
    return scaled, scaled_test, as_they_are


def _table(x: AnyArray, y: AnyArray | None, rows: AnyArray, class_names: list[str] | None) -> Table:
    inputs: Tensor = torch.from_numpy(np.ascontiguousarray(x))
    labels = None if y is None else torch.from_numpy(np.ascontiguousarray(y, dtype=np.int64))
    return Table(inputs, labels, rows.astype(np.int64), None if class_names is None else tuple(class_names))
