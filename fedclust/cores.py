"""Cores of this machine, and the threads of processes that are started on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

# Libraries read these once, when they start.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_threads(threads: int) -> None:
    """Sets the threads of libraries in this process, those that are loaded already (not torch's own) and later ones.

    Args:
        threads: Threads of each library.
    """
    numba = sys.modules.get("numba")
    variables = dict.fromkeys(_THREAD_VARIABLES, str(threads))
    if numba is not None:
        # Its pool has the size that it was loaded with, and no later value of the variable is accepted: the next
        # compilation would fail. This says how many of the pool work.
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
        del variables["NUMBA_NUM_THREADS"]
    os.environ.update(variables)
    threadpool_limits(limits=threads)


@contextmanager
def thread_variables(threads: int | None) -> Iterator[None]:
    """Sets the variables that libraries read when they are loaded, for processes started within the block.

    Args:
        threads: Threads of each process; None leaves the variables as they are.
    """
    if threads is None:
        yield
        return
    kept = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
