"""The server's side of the secure sum; see :mod:`fedclust.privacy.secure_sum` for the protocol and whom it trusts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fedclust.privacy.aggregation import AggregationServer, Sum, WrongReplies
from fedclust.privacy.fixed_point import FixedPoint
from fedclust.privacy.masking import KEY_BYTES, PairKeys, add_mask, commitment, derive_key, public_key
from fedclust.privacy.secure_sum_client import KEYS_BYTES, SEALED_BYTES, check_threshold
from fedclust.privacy.shamir import SHARE_BYTES, recover_secret
from fedclust.privacy.values import Message, Value, read


class SecureSumServer(AggregationServer):
    """The server of one secure sum: it holds public keys, sealed letters, the sum of masked vectors, and shares.

    Args:
        clients: Ids of those who are asked, at least 2.
        length: Of the vectors.
        bound: Largest absolute value that a vector may hold.
        round: Number of the round.
        threshold: How many clients must reply in every step; more than half of them. Half of them plus one if None.
        bits: Of the ring, 32 or 64.

    Raises:
        ValueError: as :class:`fedclust.privacy.aggregation.AggregationServer`, and for a threshold or bits that are not
            allowed.
    """

    mode = "secure_sum"
    steps = ("advertise", "share_keys", "input", "reveal")

    def __init__(
        self, clients: Iterable[int], length: int, bound: float, round: int, threshold: int | None, bits: int
    ) -> None:
        super().__init__(clients, length, bound, round, 2)
        n = len(self.clients)
        self.needed = check_threshold(n // 2 + 1 if threshold is None else threshold, n, self.mode)
        self.grid = FixedPoint.for_sum(n, self.bound, bits)
        self._keys: dict[int, bytes] = {}
        self._roster: tuple[int, ...] = ()
        self._letters: dict[int, bytes] = {}
        self._commitments: dict[int, bytes] = {}
        self._members: tuple[int, ...] = ()
        self._masked = np.zeros(self.length, dtype=self.grid.dtype)
        self._survivors: tuple[int, ...] = ()
        self._shares: dict[int, bytes] = {}

    @property
    def max_error(self) -> float:
        """Half a step for every client; 0 for vectors of whole multiples of the step."""
        return len(self.clients) * self.grid.step / 2

    def _request(self, step: str, client: int) -> Message:
        if step == "advertise":
            return {"clients": len(self.clients), "threshold": self.needed}
        if step == "share_keys":
            return {"roster": _array(self._roster), "keys": b"".join(self._keys[one] for one in self._roster)}
        if step == "input":
            return {
                "senders": _array(self._members),
                "letters": b"".join(self._letter(one, client) for one in self._members if one != client),
                "length": self.length,
                "bound": self.bound,
                "bits": self.grid.bits,
            }
        return {"survivors": _array(self._survivors)}

    def _letter(self, sender: int, reader: int) -> bytes:
        """The sealed letter of one member to another, out of those that the sender gave in one piece."""
        at = self._roster.index(reader) - (reader > sender)
        return self._letters[sender][at * SEALED_BYTES : (at + 1) * SEALED_BYTES]

    def _take(self, step: str, client: int, reply: Mapping[str, Value]) -> None:
        who = f"client {client}"
        if step == "advertise":
            self._keys[client] = _sized(reply, "keys", KEYS_BYTES, who)
        elif step == "share_keys":
            letters = _sized(reply, "letters", SEALED_BYTES * (len(self._roster) - 1), who)
            self._commitments[client] = _sized(reply, "commitment", 32, who)
            self._letters[client] = letters
        elif step == "input":
            masked = read(reply, "masked", np.ndarray, who)
            if masked.shape != (self.length,) or masked.dtype != self.grid.dtype:
                raise ValueError(
                    f"{who}: needs a masked vector of {self.length} {self.grid.dtype}, got shape {masked.shape} of "
                    f"{masked.dtype}"
                )
            self._masked += masked
        else:
            self._shares[client] = _sized(reply, "shares", SHARE_BYTES * len(self._members), who)

    def _close(self, step: str, replied: tuple[int, ...]) -> None:
        super()._close(step, replied)
        if step == "advertise":
            self._roster = replied
        elif step == "share_keys":
            self._members = replied
        elif step == "input":
            self._survivors = replied
            self._letters = {}

    def _result(self) -> Sum:
        try:
            return self._unmasked()
        except ValueError as error:
            raise WrongReplies(str(error), self._survivors) from error

    def _unmasked(self) -> Sum:
        """Takes the masks off: the survivors' own, and those that they share with members who dropped out."""
        total, points = self._masked.copy(), dict(zip(self._roster, range(1, len(self._roster) + 1)))
        for place, member in enumerate(self._members):
            secret = self._recover(member, place, points)
            if member in self._survivors:
                if commitment(secret, self.round, member) != self._commitments[member]:
                    raise self._wrong_share(member)
                add_mask(total, derive_key(secret, "self", self.round, member), -1)
                continue
            if public_key(secret) != self._keys[member][KEY_BYTES:]:
                raise self._wrong_share(member)
            pairs = PairKeys(secret)
            for survivor in self._survivors:
                low, high = sorted((member, survivor))
                key = pairs.key(self._keys[survivor][KEY_BYTES:], "mask", self.round, low, high)
                add_mask(total, key, -1 if survivor == low else 1)
        return Sum(self.grid.decode(total, len(self._survivors)), self._survivors)

    def _recover(self, member: int, place: int, points: Mapping[int, int]) -> bytes:
        at = place * SHARE_BYTES
        shares = {points[one]: self._shares[one][at : at + SHARE_BYTES] for one in self.alive}
        try:
            return recover_secret(shares, self.needed)
        except ValueError as error:
            raise self._wrong_share(member) from error

    def _wrong_share(self, member: int) -> ValueError:
        return ValueError(
            f"{self.mode}, round {self.round}: a share of client {member}'s secret is wrong; no sum is given. "
            f"One of clients {list(self.alive)} sent it"
        )


def _array(ids: tuple[int, ...]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def _sized(reply: Mapping[str, Value], name: str, size: int, who: str) -> bytes:
    value = read(reply, name, bytes, who)
    if len(value) != size:
        raise ValueError(f"{who}: {name!r} must have {size} bytes, got {len(value)}")
    return value
