"""Keys, masks and sealed letters of the secure sum, on the primitives of the `cryptography` package."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32
NONCE_BYTES = 12
SEAL_BYTES = NONCE_BYTES + 16
"""What sealing adds: a nonce and the tag of ChaCha20-Poly1305."""
_PROTOCOL = b"fedclust secure_sum 1"
_WORDS_AT_ONCE = 1 << 15
_ZEROS = bytes(8 * _WORDS_AT_ONCE)


def new_private_key() -> bytes:
    """A private key of X25519 from the operating system's generator, 32 bytes."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key of a private one, 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


class PairKeys:
    """The keys that the owner of a private key shares with others: HKDF-SHA256 of their X25519 agreements.

    Loading a private key costs as much as an agreement, so one object serves all the pairs of a step.

    Args:
        private: Of the owner, 32 bytes.
    """

    def __init__(self, private: bytes) -> None:
        self._private = X25519PrivateKey.from_private_bytes(private)

    def key(self, public: bytes, purpose: str, round: int, one: int, two: int) -> bytes:
        """The key of one purpose that the owner shares with the holder of another public key.

        Args:
            public: Of the other one.
            purpose: ``"mask"`` or ``"seal"``.
            round: Number of the round.
            one: Id of one of them, in an order on which both agree.
            two: Id of the other one.

        Raises:
            ValueError: naming both, for a public key whose agreement with every private key is the same.
        """
        try:
            agreed = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise ValueError(f"clients {one} and {two} cannot agree on a key: a public key is of low order") from error
        return derive_key(agreed, purpose, round, one, two)


def derive_key(secret: bytes, purpose: str, *numbers: int) -> bytes:
    """32 bytes that HKDF-SHA256 makes of a secret for one purpose and context."""
    info = context(purpose, *numbers)
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(secret)


def context(purpose: str, *numbers: int) -> bytes:
    """Protocol, purpose and numbers as bytes that no other purpose and numbers give."""
    return b"|".join([_PROTOCOL, purpose.encode(), *(number.to_bytes(8, "big") for number in numbers)])


def commitment(seed: bytes, round: int, client: int) -> bytes:
    """A fingerprint of a self-mask seed: it fixes the seed and, as that is uniform in 2²⁵⁶, does not show it."""
    return hashlib.sha256(context("commit", round, client) + seed).digest()


def roster_digest(clients: Sequence[int], keys: Sequence[bytes]) -> bytes:
    """A fingerprint of who takes part with which public keys."""
    return hashlib.sha256(context("roster", *clients) + b"".join(keys)).digest()


def add_mask(total: np.ndarray, key: bytes, sign: int) -> None:
    """Adds the mask of ``key`` to ``total``, or takes it off, in place and modulo the size of the ring.

    The mask is the key stream of AES-256 in counter mode, in little-endian words. Its counter starts at 0, so a key
    makes one mask only.

    Args:
        total: (length,) uint32 or uint64, contiguous.
        key: 32 bytes.
        sign: 1 or −1.
    """
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    size = total.dtype.itemsize
    # Some versions of the package want room for a block more.
    buffer = bytearray(_WORDS_AT_ONCE * size + 16)
    words = np.frombuffer(buffer, dtype=total.dtype.newbyteorder("<"), count=_WORDS_AT_ONCE)
    zeros = memoryview(_ZEROS)
    add = np.add if sign > 0 else np.subtract
    for start in range(0, total.size, _WORDS_AT_ONCE):
        part = total[start : start + _WORDS_AT_ONCE]
        stream.update_into(zeros[: part.size * size], buffer)
        add(part, words[: part.size], out=part)


def seal(key: bytes, plain: bytes, about: bytes) -> bytes:
    """``plain`` encrypted with ChaCha20-Poly1305 under a fresh nonce, bound to ``about``; 28 bytes longer."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plain, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes | None:
    """What was sealed, or None if it or ``about`` was changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], about)
    except InvalidTag:
        return None
