"""A run's own directory, `<root>/<name>/version_<n>/`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VERSION = re.compile(r"version_(\d+)")


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run; nobody else writes into it.

    Attributes:
        path: The directory.
    """

    path: Path

    @classmethod
    def create(cls, root: str | Path, name: str) -> Self:
        """Makes the next free `<root>/<name>/version_<n>`.

        Two processes that ask at once get different directories, because making a directory either succeeds for one
        of them or fails.

        Args:
            root: Directory of all runs, such as "runs".
            name: Name of the runs with this configuration: letters, digits, ".", "_", "-".

        Raises:
            ValueError: If the name holds other characters, or the directory cannot be made.
        """
        if not NAME.fullmatch(name):
            raise ValueError(f"the run's name must be made of letters, digits, '.', '_' and '-', not {name!r}")
        parent = Path(root).expanduser() / name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            taken = [int(found[1]) for entry in parent.iterdir() if (found := _VERSION.fullmatch(entry.name))]
            version = max(taken, default=-1) + 1
            while True:
                path = parent / f"version_{version}"
                try:
                    path.mkdir()
                except FileExistsError:
                    version += 1
                else:
                    return cls(path)
        except OSError as error:
            raise ValueError(f"runs_root: cannot make a run directory under {parent}: {error.strerror}") from error

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    def remove_if_empty(self) -> bool:
        """Removes the directory (and its parents that it leaves empty, up to the root) if no file was written."""
        for directory in (self.checkpoints, self.path, self.path.parent):
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                break
        return not self.path.exists()


def run_of_checkpoint(checkpoint: Path) -> Path | None:
    """The run directory that a checkpoint lies in, or None if it lies elsewhere."""
    candidate = checkpoint.absolute().parent.parent
    return candidate if (candidate / "config.yaml").is_file() else None
