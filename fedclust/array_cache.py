"""Arrays on disk by key, so that what takes long to compute is computed once.

A file is written beside its place and moved there in one step, so processes that write at once leave a whole file of
one of them. It holds a digest of its content, so damage is noticed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
# RuntimeError: zipfile takes a flipped flag for encryption (and NotImplementedError, a kind of it, for other methods).
_DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError)


class ArrayCache:
    """Reads and writes float32 arrays by key, one file each.

    Args:
        directory: Where the files go; it is made when the first one is written.
        name: What the arrays are, a plural such as "features": part of file names and messages.
    """

    def __init__(self, directory: str | Path, name: str) -> None:
        self.directory = Path(directory)
        self.name = name

    def path(self, key: str) -> Path:
        """The file of a key, whether it exists or not."""
        return self.directory / f"{self.name}-{key}.npz"

    def get(self, key: str) -> tuple[FloatArray, str] | None:
        """The array of a key and its remark, or None; a damaged file counts as none, with a warning."""
        path = self.path(key)
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as archive:
                values, stored = archive[self.name], str(archive["digest"])
                remark = str(archive["remark"]) if "remark" in archive.files else ""
            if values.dtype != np.float32 or stored != _digest(key, values, remark):
                raise ValueError("its content does not match its digest")
        except _DAMAGE as error:
            warnings.warn(f"the cached {self.name} in {path} are damaged ({error}) and made anew", stacklevel=3)
            return None
        return values, remark

    def put(self, key: str, values: FloatArray, remark: str = "") -> None:
        """Keeps an array; where the disk does not take it, a warning says so and nothing is kept.

        Args:
            key: Letters and digits that stand for everything that the array depends on.
            values: float32.
            remark: A word to keep beside it.
        """
        path = self.path(key)
        entries: dict[str, Any] = {self.name: values, "digest": np.array(_digest(key, values, remark))}
        if remark:
            entries["remark"] = np.array(remark)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    np.savez(file, **entries)
                os.replace(temporary, path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        except OSError as error:
            warnings.warn(f"{self.name} could not be kept in {path.parent}: {error}", stacklevel=3)


def content_key(rows: np.ndarray[Any, Any], *parts: str) -> str:
    """A key for everything that depends on these rows and on what the parts say."""
    digest = hashlib.blake2b(" ".join([str(rows.dtype), str(rows.shape), *parts]).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(rows).data)
    return digest.hexdigest()


def _digest(key: str, values: FloatArray, remark: str) -> str:
    digest = hashlib.blake2b(f"{key} {values.shape}{remark}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
