"""Secure words by default; repeatable ones only on request, with a warning and no shared streams."""

from __future__ import annotations

import warnings
from itertools import combinations

import numpy as np
import pytest

from fedclust.privacy import randomness
from fedclust.privacy.randomness import SecureRandom, SimulatedRandom, Supply, random_source


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


def test_a_supply_hands_out_the_lowest_byte_of_a_word_first_and_keeps_what_is_unused() -> None:
    source = Scripted([0x04030201, 0x08070605, 0x0C0B0A09, 0x100F0E0D])
    supply = Supply(source)
    assert supply.at_hand.size == 0
    supply.advance(0, 5)
    assert supply.at_hand.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    supply.advance(7, 1)
    assert supply.at_hand.tolist() == [8, 9, 10, 11, 12]
    supply.advance(2, 0)
    assert supply.at_hand.tolist() == [10, 11, 12]
    assert source.left == [0x100F0E0D]


def test_a_supply_asks_for_a_bounded_number_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_WORDS_AT_ONCE", 3)
    supply = Supply(SecureRandom())
    supply.advance(0, 10**9)
    assert supply.at_hand.size == 12


def test_a_source_that_runs_dry_is_refused() -> None:
    with pytest.raises(ValueError, match=r"asked for 2 random words, the source gave \(1,\)"):
        Supply(Scripted([7])).advance(0, 8)
