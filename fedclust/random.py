"""Generators derived from (seed, round, client, purpose).

Every random draw of the library comes from one of these, so the order in which clients run, the backend and a
resumed run cannot change a result.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_global_generator = threading.RLock()


def seed_for(seed: int, *parts: int | str) -> int:
    """Derives an independent seed from a run's seed and what the draw is for.

    Args:
        seed: The run's seed; 0 is a seed like any other.
        *parts: What tells this draw from all others, usually round, client id and purpose.

    Returns:
        An integer in [0, 2**63), the same on every machine.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (int(seed), *parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def numpy_generator(seed: int, *parts: int | str) -> np.random.Generator:
    """A numpy generator for one purpose; see `seed_for`."""
    return np.random.default_rng(seed_for(seed, *parts))


def torch_generator(seed: int, *parts: int | str) -> torch.Generator:
    """A torch CPU generator for one purpose; see `seed_for`."""
    return torch.Generator().manual_seed(seed_for(seed, *parts))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds torch's global generator for the block and restores it; one block at a time in a process.

    For layers that draw from the global generator and take no other: initialisers, dropout.
    """
    devices = range(torch.cuda.device_count())
    with _global_generator, torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield
