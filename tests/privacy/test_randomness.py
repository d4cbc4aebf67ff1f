"""Secure words by default; repeatable ones only on request, with a warning and no shared streams."""

from __future__ import annotations

import warnings
from itertools import combinations

import numpy as np
import pytest

from fedclust.privacy import randomness
from fedclust.privacy.randomness import RandomSource, SecureRandom, SimulatedRandom, random_source, uniform_below


class Scripted:
    """Words from a list."""

    def __init__(self, words: list[int]) -> None:
        self.left = list(words)

    def words(self, count: int) -> np.ndarray:
        head, self.left = self.left[:count], self.left[count:]
        return np.array(head, dtype=np.uint32)


def test_secure_words_never_repeat_and_are_uniform() -> None:
    first, second = SecureRandom().words(100_000), SecureRandom().words(100_000)
    assert first.dtype == np.uint32
    assert (first == second).sum() < 10
    # Mean of 100,000 uniform words: standard error 2**32 * .2887 / 316; 8 of them.
    assert abs(first.mean() / 2**32 - 0.5) < 8 * 0.2887 / 316


def test_secure_words_come_in_pieces_without_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_BYTES_AT_ONCE", 12)
    monkeypatch.setattr(randomness.os, "urandom", lambda n: bytes([7]) * n)
    assert SecureRandom().words(10).tolist() == [0x07070707] * 10


@pytest.mark.filterwarnings("ignore:simulated noise")
def test_simulated_streams_are_repeatable_and_never_shared() -> None:
    keys = [
        (0, 1, 0, "laplace"),
        (0, 1, 1, "laplace"),
        (0, 2, 0, "laplace"),
        (1, 1, 0, "laplace"),
        (0, 1, 0, "shuffle"),
        (0, 1, "management server", "laplace"),
        (0, 1, "0", "laplace"),
    ]
    streams = [SimulatedRandom(*key).words(1000) for key in keys]
    for one, two in combinations(streams, 2):
        assert (one == two).sum() < 3
    for key, stream in zip(keys, streams):
        assert np.array_equal(SimulatedRandom(*key).words(1000), stream)


@pytest.mark.filterwarnings("ignore:simulated noise")
def test_a_stream_goes_on() -> None:
    source = SimulatedRandom(0, 0, 0, "laplace")
    parts = np.concatenate([source.words(3), source.words(5)])
    assert len(np.unique(parts)) == 8
    assert np.array_equal(parts, SimulatedRandom(0, 0, 0, "laplace").words(8))


def test_simulation_warns_once_and_security_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        random_source("secure", 0, 0, 0, "laplace").words(1)
    with pytest.warns(UserWarning, match="whoever knows the seed can remove it"):
        random_source("simulated", 0, 0, 0, "laplace")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SimulatedRandom(0, 0, 1, "laplace")


def test_modes_are_what_they_say() -> None:
    assert isinstance(random_source("secure", 0, 0, 0, "laplace"), SecureRandom)
    with pytest.raises(ValueError, match="secure, simulated, got 'seeded'"):
        random_source("seeded", 0, 0, 0, "laplace")


@pytest.mark.parametrize(
    "arguments",
    [(-1, 0, 0, "x"), (0, -1, 0, "x"), (0, 0, -1, "x"), (0, 0, 0, ""), (0, 0, "", "x"), (True, 0, 0, "x")],
)
def test_bad_keys_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="got"):
        SimulatedRandom(*arguments)


def test_words_that_would_favour_small_numbers_are_drawn_again() -> None:
    # 2**32 = 3 * 1431655765 + 1: of all words only the last one is refused.
    source = Scripted([5, 2**32 - 1, 2**32 - 2, 2**32 - 1, 7])
    assert uniform_below(3, 3, source).tolist() == [2, 1, 2]
    assert source.left == []


def test_a_power_of_two_uses_every_word() -> None:
    assert uniform_below(4, 2, Scripted([2**32 - 1, 6])).tolist() == [3, 2]
    assert uniform_below(2**32, 2, Scripted([2**32 - 1, 6])).tolist() == [2**32 - 1, 6]
    assert uniform_below(1, 2, Scripted([9, 6])).tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:simulated noise")
def test_numbers_are_equally_likely() -> None:
    source: RandomSource = SimulatedRandom(0, 0, 0, "uniform")
    counts = np.bincount(uniform_below(7, 70_000, source), minlength=7)
    # Standard deviation 93 each.
    assert len(counts) == 7
    assert np.abs(counts - 10_000).max() < 500


@pytest.mark.parametrize("bound", [0, -1, 2**32 + 1])
def test_bounds_out_of_range_are_refused(bound: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 2"):
        uniform_below(bound, 1, SecureRandom())
