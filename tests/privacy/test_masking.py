"""Masks, keys and sealed letters: a published vector, cancellation, and no two contexts with one key."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from fedclust.privacy import masking
from fedclust.privacy.masking import (
    SEAL_BYTES,
    PairKeys,
    add_mask,
    commitment,
    context,
    derive_key,
    new_private_key,
    public_key,
    roster_digest,
    seal,
    unseal,
)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_the_mask_is_the_key_stream(dtype: type) -> None:
    # AES-256 of the zero block under the zero key, as other implementations publish it.
    block = bytes.fromhex("dc95c078a2408989ad48a21492842087")
    total = np.zeros(16 // np.dtype(dtype).itemsize, dtype=dtype)
    add_mask(total, bytes(32), 1)
    assert total.tolist() == np.frombuffer(block, dtype=np.dtype(dtype).newbyteorder("<")).tolist()


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("length", [1, 5, 32, 33, 64, 100])
def test_pieces_make_one_stream_and_masks_cancel(dtype: type, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start = np.arange(length, dtype=dtype)
    whole = start.copy()
    add_mask(whole, b"k" * 32, 1)
    # 32 words at once, so that longer masks come in pieces.
    monkeypatch.setattr(masking, "_WORDS_AT_ONCE", 32)
    pieces = start.copy()
    add_mask(pieces, b"k" * 32, 1)
    assert np.array_equal(whole, pieces)
    assert not (whole == start).any()
    add_mask(pieces, b"k" * 32, -1)
    assert np.array_equal(pieces, start)


def test_masks_are_uniform() -> None:
    total = np.zeros(40_000, dtype=np.uint64)
    add_mask(total, b"k" * 32, 1)
    for shift in (0, 24, 56):
        counts = np.bincount(((total >> np.uint64(shift)) & np.uint64(255)).astype(np.int64), minlength=256)
        statistic = float(((counts - 156.25) ** 2).sum() / 156.25)
        # Chi-square with 255 degrees of freedom: mean 255, standard deviation 22.6.
        assert abs(statistic - 255) < 5 * 22.6


def test_both_ends_derive_the_same_key_and_nobody_else() -> None:
    one, two, three = (new_private_key() for _ in range(3))
    key = PairKeys(one).key(public_key(two), "mask", 3, 0, 1)
    assert len(key) == 32
    assert key == PairKeys(two).key(public_key(one), "mask", 3, 0, 1)
    assert key != PairKeys(three).key(public_key(one), "mask", 3, 0, 1)


def test_every_purpose_round_and_pair_has_its_own_key() -> None:
    contexts = [("mask", 1, 0, 1), ("seal", 1, 0, 1), ("seal", 1, 1, 0), ("mask", 2, 0, 1), ("mask", 1, 0, 2)]
    keys = [derive_key(b"s" * 32, *one) for one in contexts]
    assert len(set(keys)) == len(contexts)
    assert len({context(*one) for one in contexts}) == len(contexts)
    for one, two in combinations(keys, 2):
        masks = np.zeros((2, 100), dtype=np.uint64)
        add_mask(masks[0], one, 1)
        add_mask(masks[1], two, 1)
        assert not (masks[0] == masks[1]).any()


def test_a_public_key_that_gives_no_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="clients 3 and 4 cannot agree on a key: a public key is of low order"):
        PairKeys(new_private_key()).key(bytes(32), "mask", 0, 3, 4)


def test_letters_open_only_unchanged() -> None:
    key = derive_key(b"s" * 32, "seal", 0, 1, 2)
    letter = seal(key, b"shares", b"about")
    assert len(letter) == len(b"shares") + SEAL_BYTES
    assert unseal(key, letter, b"about") == b"shares"
    assert letter != seal(key, b"shares", b"about")
    assert unseal(key, letter, b"other") is None
    assert unseal(derive_key(b"s" * 32, "seal", 0, 2, 1), letter, b"about") is None
    for at in range(len(letter)):
        changed = bytearray(letter)
        changed[at] ^= 1
        assert unseal(key, bytes(changed), b"about") is None


def test_fingerprints_differ_with_everything_they_cover() -> None:
    seed, other = b"a" * 32, b"b" * 32
    assert len({commitment(seed, 0, 1), commitment(other, 0, 1), commitment(seed, 1, 1), commitment(seed, 0, 2)}) == 4
    lists = [([1, 2], [seed, other]), ([1, 2], [other, seed]), ([1, 3], [seed, other]), ([2, 1], [seed, other])]
    assert len({roster_digest(*one) for one in lists}) == 4
