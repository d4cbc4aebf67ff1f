"""Keeps UMAP embeddings between runs that embed the same rows with the same settings; off unless asked for."""

from __future__ import annotations

import json
import platform
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from fedclust.array_cache import ArrayCache, FloatArray, content_key

_PACKAGES = ("umap-learn", "pynndescent", "numba", "numpy", "scipy", "scikit-learn")
_lock = RLock()
_active: EmbeddingCache | None = None


class EmbeddingCache:
    """Embeddings by their rows, all settings, the seed and the versions of the libraries that compute them.

    What it gives is equal, bit for bit, to what would be computed on the same machine.

    Args:
        directory: Where they are kept for other processes; None keeps them in memory only.
        memory_mb: Largest size of what is kept in memory; the longest unused go first.

    Attributes:
        hits: Embeddings that did not have to be computed.
        misses: Embeddings that had to be.
    """

    def __init__(self, directory: str | Path | None = None, memory_mb: float = 256.0) -> None:
        self._files = None if directory is None else ArrayCache(directory, "embeddings")
        self._limit = int(memory_mb * 2**20)
        self._kept: OrderedDict[str, tuple[FloatArray, str]] = OrderedDict()
        self.hits = self.misses = 0

    def key(self, rows: np.ndarray[Any, Any], settings: Mapping[str, Any], seed: int) -> str:
        """Name of the embedding of these rows."""
        return content_key(rows, json.dumps(settings, sort_keys=True), str(seed), _versions())

    def get(self, key: str) -> tuple[FloatArray, str] | None:
        """A copy of the embedding (n, d) with the kind of its start, or None."""
        with _lock:
            kept = self._kept.get(key)
            if kept is None and self._files is not None:
                kept = self._files.get(key)
            if kept is None:
                self.misses += 1
                return None
            self.hits += 1
            self._remember(key, *kept)
            return kept[0].copy(), kept[1]

    def put(self, key: str, target: FloatArray, init: str) -> None:
        """Keeps an embedding."""
        with _lock:
            self._remember(key, target.copy(), init)
            if self._files is not None:
                self._files.put(key, target, init)

    def size(self) -> int:
        """Bytes in memory."""
        return sum(target.nbytes for target, _ in self._kept.values())

    def _remember(self, key: str, target: FloatArray, init: str) -> None:
        self._kept[key] = (target, init)
        self._kept.move_to_end(key)
        while self._kept and self.size() > self._limit:
            self._kept.popitem(last=False)


@contextmanager
def keep_embeddings(cache: EmbeddingCache | None) -> Iterator[None]:
    """Has `umap_embedding` use a cache within the block, in all threads of this process."""
    global _active
    with _lock:
        before, _active = _active, cache
    try:
        yield
    finally:
        with _lock:
            _active = before


def active_cache() -> EmbeddingCache | None:
    """The cache in use, or None."""
    return _active


def _versions() -> str:
    found = [platform.machine()]
    for package in _PACKAGES:
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("none")
    return " ".join(found)
