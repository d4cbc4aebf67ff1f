"""Shares of rows: hold-outs, test rows that follow the clients' label proportions, and how skewed a deal is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedclust.apportion import allocate_rows
from fedclust.data.tables import IntArray
from fedclust.random import numpy_generator

AnyArray = np.ndarray[Any, Any]


def holdout(labels: AnyArray | None, n: int, share: float, rng: np.random.Generator) -> IntArray:
    """Positions of a random share of `n` rows, every label in proportion (plain random without labels).

    The number held out is ``share * n`` rounded to the nearest whole number (halves up), and never all rows.

    Args:
        labels: Label of each row, or None.
        n: Number of rows.
        share: In [0, 1).
        rng: Source of the draw.

    Returns:
        Sorted int64 positions.
    """
    size = min(int(np.floor(share * n + 0.5)), max(n - 1, 0))
    if size == 0:
        return np.empty(0, dtype=np.int64)
    if labels is None:
        return np.sort(rng.permutation(n)[:size]).astype(np.int64)
    codes, sizes = np.unique(labels, return_inverse=True, return_counts=True)[1:]
    counts = allocate_rows(size, sizes)
    picked = [rng.permutation(np.flatnonzero(codes == code))[:count] for code, count in enumerate(counts)]
    return np.sort(np.concatenate(picked)).astype(np.int64)


def matching_test_parts(
    train_labels: AnyArray | None,
    train_parts: Sequence[AnyArray],
    test_labels: AnyArray | None,
    seed: int,
    *,
    n_test: int | None = None,
) -> list[IntArray]:
    """Deal the test rows so that a client's test part follows the proportions of its training part.

    Each label's test rows are split over the clients in proportion to their training rows with that label (largest
    remainder). A label that no client trains on, and data without labels, is split in proportion to the clients' sizes.

    Args:
        train_labels: Label of each training row, or None.
        train_parts: Row positions of each client (as `Partition.split` returns them).
        test_labels: Label of each test row, or None.
        seed: Seed of the draw of which rows go where.
        n_test: Number of test rows; needed without test labels.

    Returns:
        One sorted int64 array per client: disjoint, and together all test rows.

    Raises:
        ValueError: If only one side has labels, or the number of test rows is not known.
    """
    if (train_labels is None) != (test_labels is None):
        raise ValueError("train and test must both have labels, or neither")
    n = len(test_labels) if test_labels is not None else n_test
    if n is None:
        raise ValueError("without test labels, give n_test")
    sizes = np.array([len(part) for part in train_parts], dtype=np.int64)
    rng = numpy_generator(seed, "test parts")
    parts: list[list[AnyArray]] = [[np.empty(0, dtype=np.int64)] for _ in train_parts]
    if test_labels is None or train_labels is None:
        blocks = [(np.arange(n), sizes)]
    else:
        test_values, train_values = np.asarray(test_labels), np.asarray(train_labels)
        blocks = []
        for label in np.unique(test_values):
            counts = np.array([np.count_nonzero(train_values[part] == label) for part in train_parts])
            blocks.append((np.flatnonzero(test_values == label), counts if counts.any() else sizes))
    for rows, weights in blocks:
        if len(rows) == 0:
            continue
        cuts = np.cumsum(allocate_rows(len(rows), weights))[:-1]
        for client, piece in enumerate(np.split(rng.permutation(rows), cuts)):
            parts[client].append(piece)
    return [np.sort(np.concatenate(pieces)).astype(np.int64) for pieces in parts]


def label_entropies(labels: AnyArray, parts: Sequence[AnyArray]) -> list[float | None]:
    """Entropy (in nats) of each client's label shares: 0 for one label, log C when all C are equal; None if empty."""
    values = np.asarray(labels)
    result: list[float | None] = []
    for part in parts:
        if len(part) == 0:
            result.append(None)
            continue
        shares = np.unique(values[part], return_counts=True)[1] / len(part)
        result.append(abs(float(-(shares * np.log(shares)).sum())))
    return result


def mean_label_entropy(labels: AnyArray, parts: Sequence[AnyArray]) -> float:
    """Mean of `label_entropies` over the clients that have rows, in nats: the smaller, the more label skew.

    Raises:
        ValueError: If no client has rows.
    """
    entropies = [value for value in label_entropies(labels, parts) if value is not None]
    if not entropies:
        raise ValueError("no client has rows")
    return float(np.mean(entropies))
