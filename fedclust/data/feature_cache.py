"""Features on disk, so that a data set passes through an encoder once.

One file per pair of rows and encoder. A file is written beside its place and moved there in one step, so processes that
write at once leave a whole file of one of them. It holds a digest of its content, so damage is noticed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

AUTO = "auto"
_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)


class FeatureCache:
    """Reads and writes features by key.

    Args:
        directory: Where the files go; "auto" is ``$FEDCLUST_CACHE``, else ``~/.cache/fedclust``; None keeps nothing.
    """

    def __init__(self, directory: str | Path | None = AUTO) -> None:
        if directory == AUTO:
            directory = os.environ.get("FEDCLUST_CACHE") or Path("~/.cache/fedclust")
        self.directory = None if directory is None else Path(directory).expanduser()

    def path(self, key: str) -> Path | None:
        """The file of a key, whether it exists or not; None without a directory."""
        return None if self.directory is None else self.directory / f"features-{key}.npz"

    def get(self, key: str) -> Tensor | None:
        """The features of a key, (n, d) float32, or None; a damaged file counts as none, with a warning."""
        path = self.path(key)
        if path is None or not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as archive:
                features, stored = archive["features"], str(archive["digest"])
            if features.dtype != np.float32 or stored != _digest(key, features):
                raise ValueError("its content does not match its digest")
        except _DAMAGE as error:
            warnings.warn(f"the cached features in {path} are damaged ({error}) and made anew", stacklevel=2)
            return None
        return torch.from_numpy(features)

    def put(self, key: str, features: Tensor) -> None:
        """Keeps features; where the disk does not take them, a warning says so and nothing is kept."""
        path = self.path(key)
        if path is None:
            return
        values = features.numpy()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    np.savez(file, features=values, digest=np.array(_digest(key, values)))
                os.replace(temporary, path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            warnings.warn(f"features could not be kept in {path.parent}: {error}", stacklevel=2)


def feature_key(rows: Tensor, fingerprint: str) -> str:
    """Name of the features of these rows under the encoder with this fingerprint."""
    digest = hashlib.blake2b(f"{rows.dtype} {tuple(rows.shape)} {fingerprint}".encode(), digest_size=16)
    digest.update(rows.contiguous().numpy().data)
    return digest.hexdigest()


def _digest(key: str, features: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> str:
    digest = hashlib.blake2b(f"{key} {features.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(features).data)
    return digest.hexdigest()
