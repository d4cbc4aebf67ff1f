"""TenSEAL, an optional package, and what is read from bytes with it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from fedclust.privacy.values import Value, read


def load_tenseal() -> ModuleType:
    """The package TenSEAL.

    Raises:
        ImportError: naming the extra, if it is not installed.
    """
    try:
        import tenseal
    except ImportError as error:
        raise ImportError("mode 'ckks' needs TenSEAL: pip install 'fedclust[he]'") from error
    return tenseal


def ciphertexts(tenseal: ModuleType, context: Any, message: Mapping[str, Value], who: str) -> list[Any]:
    """The ciphertexts of a message: "chunk/0", "chunk/1" and so on.

    Raises:
        ValueError: naming ``who``, for one that is missing or none of these parameters.
    """
    count = sum(name.startswith("chunk/") for name in message)
    chunks = [read(message, f"chunk/{at}", bytes, who) for at in range(count)]
    try:
        return [tenseal.ckks_vector_from(context, chunk) for chunk in chunks]
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{who}: what was sent is no ciphertext of these parameters: {error}") from error


def context_from(tenseal: ModuleType, context: bytes, who: str) -> Any:
    """TenSEAL's context, read from bytes.

    Raises:
        ValueError: naming ``who``, if they are none.
    """
    try:
        return tenseal.context_from(context)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{who}: what was sent is no context of the encryption: {error}") from error


def form_of(ciphertext: Any) -> tuple[float, int, int]:
    """What two ciphertexts must share to be added: scale, number of polynomials, primes that are left."""
    return ciphertext.scale, ciphertext.size(), ciphertext.coeff_modulus_size()
