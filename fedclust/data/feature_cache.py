"""Features on disk, so that a data set passes through an encoder once: one file per pair of rows and encoder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from torch import Tensor

from fedclust.array_cache import ArrayCache

AUTO = "auto"


class FeatureCache:
    """Reads and writes features by key.

    Args:
        directory: Where the files go; "auto" is ``$FEDCLUST_CACHE``, else ``~/.cache/fedclust``; None keeps nothing.
    """

    def __init__(self, directory: str | Path | None = AUTO) -> None:
        if directory == AUTO:
            directory = os.environ.get("FEDCLUST_CACHE") or Path("~/.cache/fedclust")
        self.directory = None if directory is None else Path(directory).expanduser()
        self._files = None if self.directory is None else ArrayCache(self.directory, "features")

    def path(self, key: str) -> Path | None:
        """The file of a key, whether it exists or not; None without a directory."""
        return None if self._files is None else self._files.path(key)

    def get(self, key: str) -> Tensor | None:
        """The features of a key, (n, d) float32, or None; a damaged file counts as none, with a warning."""
        kept = None if self._files is None else self._files.get(key)
        return None if kept is None else torch.from_numpy(kept[0])

    def put(self, key: str, features: Tensor) -> None:
        """Keeps features; where the disk does not take them, a warning says so and nothing is kept."""
        if self._files is not None:
            self._files.put(key, features.numpy())


def feature_key(rows: Tensor, fingerprint: str) -> str:
    """Name of the features of these rows under the encoder with this fingerprint."""
    digest = hashlib.blake2b(f"{rows.dtype} {tuple(rows.shape)} {fingerprint}".encode(), digest_size=16)
    digest.update(rows.contiguous().numpy().data)
    return digest.hexdigest()
