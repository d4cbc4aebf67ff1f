"""One way to compile the numeric kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled by numba, without the interpreter lock; kept on disk for later processes if possible.

    Kernels start no threads of their own, so any number of them may run side by side.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no writable place for the cache, as in a read-only container
        return njit(nogil=True)(function)
