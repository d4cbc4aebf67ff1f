"""The C library's allocator: memory that one training step frees is kept for the next."""

from __future__ import annotations

import ctypes
import os
import platform

# Parameters of glibc's mallopt (malloc.h), and the variables by which a user sets the same from outside.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")

KEPT = 1 << 30
"""Bytes of freed memory that a process keeps at most before it gives the rest back to the system."""

LARGEST = 32 << 20
"""Blocks up to so many bytes come from kept memory; glibc allows no larger bound."""


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed blocks instead of handing them back to the system at once.

    Activations and gradients of a step are a few megabytes each. By default glibc returns them to the system when they
    are freed, and the next step gets them page by page again: for the CNN of the PA-CFL paper more than 2,000 page
    faults in every step (`benchmarks/local_step.py`). The setting is the whole process's; up to 1 GiB of freed memory
    stays with it.

    Returns:
        Whether it was set. It is not where the C library is not glibc, or where one of its variables is set
        (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `MALLOC_TOP_PAD_`, `GLIBC_TUNABLES`).
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, KEPT))
