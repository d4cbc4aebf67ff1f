"""Where the random bits of the privacy room come from: the operating system, or a seed for simulations only."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from typing import Protocol

import numpy as np

from fedclust.checks import choice, positive_int, seed_value
from fedclust.random import numpy_generator

_BYTES_AT_ONCE = 1 << 24
_WORDS = 1 << 32
_lock = threading.Lock()
_warned = False


class RandomSource(Protocol):
    """A stream of independent, uniform 32-bit words."""

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words, (count,) uint32."""


class SecureRandom:
    """Words from the operating system's cryptographic generator; the default everywhere, never repeatable."""

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words, (count,) uint32."""
        words = np.empty(count, dtype=np.uint32)
        raw = words.view(np.uint8)
        for start in range(0, raw.size, _BYTES_AT_ONCE):
            part = raw[start : start + _BYTES_AT_ONCE]
            part[:] = np.frombuffer(os.urandom(part.size), dtype=np.uint8)
        return words


class SimulatedRandom:
    """Repeatable words for experiments: one stream per (seed, round, client, purpose), warned about once a process.

    Whoever knows the seed can subtract the noise and undo the shuffle: nothing is protected in this mode.

    Args:
        seed: The run's seed.
        round: Number of the round.
        client: Id of the client, or the name of a server.
        purpose: What the words are for, such as ``"laplace"``.

    Raises:
        ValueError: for a negative seed or round, a client that is neither an id nor a name, or an empty purpose.
    """

    def __init__(self, seed: int, round: int, client: int | str, purpose: str) -> None:
        if not isinstance(client, str):
            client = positive_int("client", client, least=0)
        if not purpose or not isinstance(purpose, str) or client == "":
            raise ValueError(f"client and purpose must not be empty, got client {client!r} and purpose {purpose!r}")
        round = positive_int("round", round, least=0)
        self._generator = numpy_generator(seed_value("seed", seed), "privacy", round, client, purpose)
        _warn_once()

    def words(self, count: int) -> np.ndarray:
        """The next ``count`` words, (count,) uint32, the same on every machine."""
        words = np.frombuffer(self._generator.bytes(4 * count), dtype=np.uint32)
        return words if sys.byteorder == "little" else words.byteswap()


def random_source(mode: str, seed: int, round: int, client: int | str, purpose: str) -> RandomSource:
    """The source that ``mode`` names: ``"secure"`` or ``"simulated"``.

    Raises:
        ValueError: for another mode, or as :class:`SimulatedRandom`.
    """
    if choice("the source of noise", mode, ("secure", "simulated")) == "secure":
        return SecureRandom()
    return SimulatedRandom(seed, round, client, purpose)


def uniform_below(bound: int, count: int, source: RandomSource) -> np.ndarray:
    """``count`` integers from 0 to ``bound`` − 1, (count,) uint32, each exactly equally likely.

    Raises:
        ValueError: unless 1 <= ``bound`` <= 2³².
    """
    if not 1 <= bound <= _WORDS:
        raise ValueError(f"bound must lie between 1 and 2**32, got {bound}")
    # The remainder of words at or above the largest multiple of bound would favour small values.
    largest = _WORDS // bound * bound - 1
    words = source.words(count)
    again = np.flatnonzero(words > largest)
    if again.size:
        words = words.copy()
    while again.size:
        words[again] = source.words(again.size)
        again = again[words[again] > largest]
    return words % np.uint32(bound) if bound < _WORDS else words


def _warn_once() -> None:
    global _warned
    with _lock:
        if _warned:
            return
        _warned = True
    warnings.warn(
        "simulated noise comes from the run's seed: whoever knows the seed can remove it, so nothing is protected; "
        "use it for experiments only",
        stacklevel=3,
    )
