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
_WORDS_AT_ONCE = 1 << 14
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


class Supply:
    """Bytes of a source for one purpose, the lowest byte of a word first; what is left in the end is thrown away.

    Args:
        source: Whose words are used up.

    Attributes:
        at_hand: (bytes,) uint8, not used so far.
    """

    def __init__(self, source: RandomSource) -> None:
        self._source = source
        self.at_hand = np.empty(0, dtype=np.uint8)

    def advance(self, used: int, wanted: int) -> None:
        """Drops the first ``used`` bytes at hand, and adds ``wanted`` fresh ones: whole words, 2¹⁴ of them at most.

        Raises:
            ValueError: If the source gives another number of words than it was asked for.
        """
        self.at_hand = self.at_hand[used:]
        words = min(-(-wanted // 4), _WORDS_AT_ONCE)
        if words > 0:
            fresh = self._source.words(words)
            if fresh.shape != (words,):
                raise ValueError(f"asked for {words} random words, the source gave {fresh.shape}")
            self.at_hand = np.concatenate((self.at_hand, fresh.astype("<u4", copy=False).view(np.uint8)))


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
