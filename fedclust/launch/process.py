"""A run inside a process that goes on after it: what it changes for itself is put back."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from fedclust.report.quiet import quiet_lightning

_SEED_VARIABLES = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


@contextmanager
def borrowed_process() -> Iterator[None]:
    """Leaves seed variables, warning filters and the Ctrl-C handler as they were, for callers inside a process."""
    kept = {name: os.environ.get(name) for name in _SEED_VARIABLES}
    handler = signal.getsignal(signal.SIGINT)
    notes = _NoteHandler()
    with warnings.catch_warnings():
        quiet_lightning()
        warnings.showwarning = _show_warning
        logging.getLogger("fedclust").addHandler(notes)
        try:
            yield
        finally:
            logging.getLogger("fedclust").removeHandler(notes)
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            changed = handler is not None and signal.getsignal(signal.SIGINT) is not handler
            if changed and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, handler)


class _NoteHandler(logging.Handler):
    """Writes what the library logs without breaking a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(f"note: {record.getMessage()}", file=sys.stderr)


def _show_warning(message: Warning | str, category: type[Warning], *unused: Any, **also_unused: Any) -> None:
    tqdm.write(f"warning: {' '.join(str(message).split())}", file=sys.stderr)
