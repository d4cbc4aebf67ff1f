"""Shared helpers of the data tests: tiny files in the formats the library reads."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


def _idx_bytes(array: np.ndarray) -> bytes:
    """An array of unsigned bytes in IDX format."""
    return struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}i", *array.shape) + array.tobytes()


def _write_idx_set(folder: Path, *, zipped: bool, n: int = 40, n_test: int = 20) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    arrays = {}
    for part, rows in (("train", n), ("t10k", n_test)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, size=(rows, 28, 28), dtype=np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = (np.arange(rows) % 10).astype(np.uint8)
    for name, array in arrays.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(_idx_bytes(array)))
        else:
            (folder / name).write_bytes(_idx_bytes(array))
    return arrays


@pytest.fixture
def write_idx_set() -> Callable[..., dict[str, np.ndarray]]:
    """A function that writes the four MNIST files with random content and returns what they hold."""
    return _write_idx_set
