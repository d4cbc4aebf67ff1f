"""One lock for all processes of this machine that work on a study."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_POLL = 0.02


class StudyLock:
    """A file whose lock is held while trials are counted and asked for; released when its holder dies.

    Args:
        path: The file; it stays empty.
        patience: Seconds to wait before giving up.
    """

    _here = RLock()

    def __init__(self, path: Path, patience: float = 600.0) -> None:
        self.path = path
        self.patience = patience

    @staticmethod
    def between_processes() -> bool:
        """Whether this system has file locks; without them only one process may work on a study."""
        return fcntl is not None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Holds the lock for the block; not to be nested.

        Raises:
            TimeoutError: If somebody else held it for longer than `patience`.
        """
        if fcntl is None:
            with self._here:
                yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._here, self.path.open("a") as file:
            self._acquire(file.fileno())
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)

    def _acquire(self, descriptor: int) -> None:
        deadline = time.monotonic() + self.patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process holds {self.path} for over {self.patience:.0f} s") from None
                time.sleep(_POLL)
            else:
                return
