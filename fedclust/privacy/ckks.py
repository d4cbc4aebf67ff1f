"""Sums of encrypted vectors with CKKS (J. H. Cheon, A. Kim, M. Kim, Y. Song, 2017), through TenSEAL: additions only.

One client is the key-holder: the one with the smallest id. For every sum it makes a new key pair.

1. ``advertise``: the key-holder sends the public key, without the secret one, which it keeps.
2. ``input``: every client rounds its vector to a grid, encrypts it in pieces of as many values as a ciphertext has
   slots, and sends the ciphertexts. The server adds them up; it has nothing to decrypt them with.
3. ``reveal``: the key-holder decrypts the sum, rounds it to the grid, and sends it.

The grid is so much coarser than the noise of the encryption (twelve standard deviations are half a step) that the
rounded sum is exactly the sum of the rounded vectors. So it tells nothing about that noise, from which a server could
otherwise work out the secret key (B. Li, D. Micciancio, On the security of homomorphic encryption on approximate
numbers, 2021).

Trusted: that server and key-holder do not work together (then they see everything), that the server has the key-holder
decrypt the sum and not one client's vector, and that it passes the public key on unchanged. If the key-holder drops
out, there is no sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from fedclust.checks import positive_int
from fedclust.privacy.aggregation import AggregationClient, AggregationServer, Sum, TooFewClients
from fedclust.privacy.tenseal_io import ciphertexts, context_from, form_of, load_tenseal
from fedclust.privacy.values import Message, Value, as_vector, read

# Bits of the modulus at 128 bits of security, by degree (Homomorphic Encryption Security Standard, 2018, Table 1).
_MODULUS_LIMIT = {4096: 109, 8192: 218, 16384: 438}
# Beyond it, the doubles that values are encoded with are less exact than the encryption.
_USEFUL_BITS = 60
_DEVIATIONS = 12
_COARSEST = 2.0**-10


class CKKSClient(AggregationClient):
    """A client of an encrypted sum; the key-holder's :attr:`state` holds the secret key until it has decrypted once."""

    def _reply(self, step: str, request: Mapping[str, Value], vector: Any) -> tuple[Message, Message]:
        tenseal, round = load_tenseal(), read(request, "round", int, self.who)
        if step == "advertise":
            return self._make_keys(tenseal, request, round)
        if step == "input":
            return self._encrypt(tenseal, request, vector), self._state
        if step != "reveal" or (self._state.get("stage"), self._state.get("round")) != ("advertise", round):
            raise ValueError(f"{self.who}: refuses step {step!r} of round {round}: it holds no key of that round")
        secret = tenseal.context_from(read(self._state, "secret", bytes, self.who))
        length = read(request, "length", int, self.who)
        parts = [part.decrypt() for part in ciphertexts(tenseal, secret, request, self.who)]
        total = np.concatenate([np.asarray(part, dtype=np.float64) for part in parts])[:length]
        total *= read(request, "unit", float, self.who)
        # The secret key is forgotten, so that it cannot decrypt anything else.
        state: Message = {"stage": "reveal", "round": round}
        return {"total": _to_grid(total, read(request, "step_size", float, self.who))}, state

    def _make_keys(self, tenseal: ModuleType, request: Mapping[str, Value], round: int) -> tuple[Message, Message]:
        degree, scale_bits = (read(request, name, int, self.who) for name in ("degree", "scale_bits"))
        sizes = check_parameters(degree, read(request, "modulus_bits", np.ndarray, self.who).tolist())
        context = tenseal.context(
            tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=degree, coeff_mod_bit_sizes=list(sizes), n_threads=1
        )
        context.global_scale = 2.0**scale_bits
        kinds = {"save_galois_keys": False, "save_relin_keys": False}
        public = context.serialize(save_public_key=True, save_secret_key=False, **kinds)
        secret = context.serialize(save_public_key=False, save_secret_key=True, **kinds)
        return {"context": public}, {"stage": "advertise", "round": round, "secret": secret}

    def _encrypt(self, tenseal: ModuleType, request: Mapping[str, Value], vector: Any) -> Message:
        length, bound = read(request, "length", int, self.who), read(request, "bound", float, self.who)
        slots, step = read(request, "slots", int, self.who), read(request, "step_size", float, self.who)
        values = _to_grid(as_vector(vector, length, bound, self.who), step) / read(request, "unit", float, self.who)
        context = context_from(tenseal, read(request, "context", bytes, self.who), self.who)
        if context.has_secret_key():
            raise ValueError(
                f"{self.who}: was sent a secret key; the server could decrypt its vector, so it sends none"
            )
        answer: Message = {}
        for at, start in enumerate(range(0, length, slots)):
            answer[f"chunk/{at}"] = tenseal.ckks_vector(context, values[start : start + slots]).serialize()
        return answer


class CKKSServer(AggregationServer):
    """The server of one encrypted sum: it holds the public key and the sum of the ciphertexts.

    Args:
        clients: Ids of those who are asked, at least 2; the smallest is the key-holder.
        length: Of the vectors.
        bound: Largest absolute value that a vector may hold.
        round: Number of the round.
        options: Parameters of the encryption.

    Raises:
        ValueError: as :class:`fedclust.privacy.aggregation.AggregationServer`, and if the modulus is too small for
            sums of that many values of that size.
    """

    mode = "ckks"
    steps = ("advertise", "input", "reveal")

    def __init__(self, clients: Iterable[int], length: int, bound: float, round: int, options: CKKSSum) -> None:
        super().__init__(clients, length, bound, round, 2)
        self.options, self.key_holder = options, self.clients[0]
        self.slots = options.degree // 2
        self.unit, self.step = options.unit_and_step(len(self.clients), self.bound)
        self._tenseal = load_tenseal()
        self._context = b""
        self._public: Any = None
        self._sums: list[Any] = []
        self._survivors: tuple[int, ...] = ()
        self._total: np.ndarray | None = None

    @property
    def max_error(self) -> float:
        """Half a step of the grid for every client; 0 for vectors of whole multiples of the step."""
        return len(self.clients) * self.step / 2

    def _whom(self, step: str) -> tuple[int, ...]:
        return self.alive if step == "input" else (self.key_holder,)

    def _request(self, step: str, client: int) -> Message:
        if step == "advertise":
            sizes = np.array(self.options.modulus_bits, dtype=np.int64)
            return {"degree": self.options.degree, "modulus_bits": sizes, "scale_bits": self.options.scale_bits}
        sizes_of: Message = {"length": self.length, "step_size": self.step, "unit": self.unit}
        if step == "input":
            return {"context": self._context, "bound": self.bound, "slots": self.slots, **sizes_of}
        return {**{f"chunk/{at}": part.serialize() for at, part in enumerate(self._sums)}, **sizes_of}

    def _take(self, step: str, client: int, reply: Mapping[str, Value]) -> None:
        who = f"client {client}"
        if step == "advertise":
            self._take_context(read(reply, "context", bytes, who), who)
        elif step == "input":
            self._add(reply, who)
        else:
            total = read(reply, "total", np.ndarray, who)
            self._total = as_vector(total, self.length, (self.bound + self.step) * len(self._survivors), who)

    def _take_context(self, context: bytes, who: str) -> None:
        public = context_from(self._tenseal, context, who)
        if public.has_secret_key():
            raise ValueError(f"{who}: sent its secret key; it is not kept")
        self._context, self._public = context, public

    def _add(self, reply: Mapping[str, Value], who: str) -> None:
        chunks = ciphertexts(self._tenseal, self._public, reply, who)
        sizes, wanted = [chunk.size() for chunk in chunks], self._sizes()
        if sizes != wanted:
            raise ValueError(f"{who}: needs ciphertexts of {wanted} values, got {sizes}")
        # Checked for all chunks before any is added: a refused reply must leave nothing behind.
        form = (2.0**self.options.scale_bits, 2, len(self.options.modulus_bits) - 1)
        forms = {form_of(part) for chunk in chunks for part in chunk.ciphertext()}
        if forms != {form}:
            raise ValueError(f"{who}: needs ciphertexts of (scale, polynomials, primes) {form}, got {sorted(forms)}")
        if not self._sums:
            self._sums = chunks
        else:
            # In place on the server's own sums; no client's ciphertext is changed.
            for part, chunk in zip(self._sums, chunks):
                part += chunk

    def _sizes(self) -> list[int]:
        return [min(self.slots, self.length - start) for start in range(0, self.length, self.slots)]

    def _close(self, step: str, replied: tuple[int, ...]) -> None:
        if step == "input":
            super()._close(step, replied)
            self._survivors = replied
        elif not replied:
            raise TooFewClients(
                f"{self.mode}, round {self.round}, step {step!r}: the key-holder, client {self.key_holder}, did not "
                "reply, and nobody else can decrypt. No sum is given"
            )

    def _result(self) -> Sum:
        assert self._total is not None
        return Sum(self._total, self._survivors)


@dataclass(frozen=True)
class CKKSSum:
    """Encrypted sums; the sum is exact for whole multiples of the grid's step and within n half steps otherwise.

    Attributes:
        degree: Of the polynomials: 4096, 8192 or 16384; half of it is the number of slots.
        modulus_bits: Sizes of the primes of the modulus, 20 to 60 bits each, the last of which is used for keys only.

    Raises:
        ValueError: for parameters with less than 128 bits of security, or that cannot work.
        ImportError: naming the extra, if TenSEAL is not installed.
    """

    degree: int = 8192
    modulus_bits: tuple[int, ...] = (60, 60)
    mode: ClassVar[str] = CKKSServer.mode
    steps: ClassVar[tuple[str, ...]] = CKKSServer.steps

    def __post_init__(self) -> None:
        object.__setattr__(self, "modulus_bits", check_parameters(self.degree, self.modulus_bits))
        load_tenseal()

    def server(self, clients: Iterable[int], length: int, bound: float, round: int = 0) -> CKKSServer:
        """The server's side of one sum.

        Raises:
            ValueError: as :class:`CKKSServer`.
        """
        return CKKSServer(clients, length, bound, round, self)

    def client(self, client: int, state: Mapping[str, Value] | None = None) -> CKKSClient:
        """A client's side, with what it remembers from the step before."""
        return CKKSClient(client, state)

    @property
    def scale_bits(self) -> int:
        """Bits of the scale: as many as leave room for sums of less than 1, and never more than the modulus has."""
        return min(sum(self.modulus_bits[:-1]), _USEFUL_BITS) - 3

    def unit_and_step(self, clients: int, bound: float) -> tuple[float, float]:
        """What values are divided by so that sums are less than 1, and the step of the grid, as small as noise allows.

        Both are powers of two, so that dividing rounds nothing. A fresh ciphertext's noise is rounding of the
        coefficients and of their products with a ternary secret: in a slot about degree/6 of the scale's units as
        standard deviation; n of them add up to √n times that.

        Raises:
            ValueError: If that step is coarser than a thousandth of the bound, or the bound is beyond 2^±900.
        """
        if not 2.0**-900 <= bound <= 2.0**900:
            raise ValueError(f"bound must lie between 2**-900 and 2**900, got {bound!r}")
        unit = math.frexp(clients * bound)[1]
        noise = math.sqrt(clients) * self.degree / 6
        step = math.ldexp(1.0, math.frexp(2 * _DEVIATIONS * noise)[1] - self.scale_bits + unit)
        if step > bound * _COARSEST:
            raise ValueError(
                f"ckks: sums of {clients} values within ±{bound:g} need more modulus bits than {self.modulus_bits}: "
                f"the step would be {step:g}"
            )
        return math.ldexp(1.0, unit), step


def check_parameters(degree: int, modulus_bits: Iterable[int]) -> tuple[int, ...]:
    """The sizes of the primes, if they are allowed with that degree.

    Raises:
        ValueError: for another degree, fewer than two primes, sizes out of range or a modulus that is too large to be
            secure.
    """
    if isinstance(degree, bool) or degree not in _MODULUS_LIMIT:
        raise ValueError(f"degree must be one of {list(_MODULUS_LIMIT)}, got {degree!r}")
    sizes = tuple(positive_int("modulus_bits", size) for size in modulus_bits)
    if len(sizes) < 2 or not all(20 <= size <= 60 for size in sizes) or sum(sizes) > _MODULUS_LIMIT[degree]:
        raise ValueError(
            f"modulus_bits must be at least two sizes of 20 to 60 bits, together at most {_MODULUS_LIMIT[degree]} for "
            f"128 bits of security at degree {degree}, got {sizes}"
        )
    return sizes


def _to_grid(values: np.ndarray, step: float) -> np.ndarray:
    return np.rint(values / step) * step
