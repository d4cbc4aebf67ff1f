"""The client's side of the secure sum; see :mod:`fedclust.privacy.secure_sum` for the protocol and whom it trusts."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedclust.privacy.aggregation import AggregationClient
from fedclust.privacy.fixed_point import FixedPoint
from fedclust.privacy.masking import (
    KEY_BYTES,
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
from fedclust.privacy.shamir import SHARE_BYTES, split_secret
from fedclust.privacy.values import Message, Value, as_vector, read

KEYS_BYTES = 2 * KEY_BYTES
"""Two public keys: one for sealing shares, one for masks."""
PAIR_BYTES = 2 * SHARE_BYTES
"""A share of the mask key, then a share of the self-mask seed."""
SEALED_BYTES = PAIR_BYTES + SEAL_BYTES
_AFTER = {"advertise": "", "share_keys": "advertise", "input": "share_keys", "reveal": "input"}


def check_threshold(threshold: int, clients: int, who: str) -> int:
    """The threshold, if it is more than half of the clients and no more than all of them.

    More than half, so that no server can have one half reveal a client's key and the other half its seed.

    Raises:
        ValueError: naming ``who``.
    """
    least = clients // 2 + 1
    if isinstance(threshold, bool) or not isinstance(threshold, int) or not max(least, 2) <= threshold <= clients:
        raise ValueError(
            f"{who}: threshold must lie between {max(least, 2)} and {clients} for {clients} clients, got {threshold!r}"
        )
    return threshold


class SecureSumClient(AggregationClient):
    """A client of the secure sum. Its private keys and its seed are in :attr:`state` until it has sent its input."""

    def _reply(self, step: str, request: Mapping[str, Value], vector: Any) -> tuple[Message, Message]:
        if step == "advertise":
            return self._advertise(request)
        stage, round = self._state.get("stage", "nothing"), read(request, "round", int, self.who)
        if step not in _AFTER or (_AFTER[step], round) != (stage, self._state.get("round")):
            raise ValueError(
                f"{self.who}: refuses step {step!r} of round {round}; it is at {stage!r} of round "
                f"{self._state.get('round')!r}, and answers each step once"
            )
        if step == "share_keys":
            return self._share_keys(request)
        return self._input(request, vector) if step == "input" else self._reveal(request)

    def _advertise(self, request: Mapping[str, Value]) -> tuple[Message, Message]:
        """Two fresh key pairs; the public keys are the answer."""
        clients, threshold = (read(request, name, int, self.who) for name in ("clients", "threshold"))
        check_threshold(threshold, clients, self.who)
        seal_key, mask_key = new_private_key(), new_private_key()
        state: Message = {
            "stage": "advertise",
            "round": read(request, "round", int, self.who),
            "clients": clients,
            "threshold": threshold,
            "seal_key": seal_key,
            "mask_key": mask_key,
        }
        return {"keys": public_key(seal_key) + public_key(mask_key)}, state

    def _share_keys(self, request: Mapping[str, Value]) -> tuple[Message, Message]:
        """A new seed; shares of it and of the mask key, each sealed for the client that it is meant for."""
        roster = self._members(request, "roster", "keys", KEYS_BYTES)
        own = public_key(self._secret("seal_key")) + public_key(self._secret("mask_key"))
        if roster[self.client] != own or len(set(roster.values())) < len(roster):
            raise ValueError(f"{self.who}: the list of public keys changes its own or holds one twice")
        threshold, round = read(self._state, "threshold", int, self.who), read(self._state, "round", int, self.who)
        seed = secrets.token_bytes(KEY_BYTES)
        key_shares = split_secret(self._secret("mask_key"), threshold, len(roster))
        seed_shares = split_secret(seed, threshold, len(roster))
        letters, kept = [], b""
        pairs, digest = PairKeys(self._secret("seal_key")), _digest(roster)
        for at, other in enumerate(roster):
            plain = key_shares[at] + seed_shares[at]
            if other == self.client:
                kept = plain
            else:
                key = pairs.key(roster[other][:KEY_BYTES], "seal", round, self.client, other)
                letters.append(seal(key, plain, _about(round, self.client, other, digest)))
        answer: Message = {"letters": b"".join(letters), "commitment": commitment(seed, round, self.client)}
        new: Message = {"stage": "share_keys", "roster": request["roster"], "keys": request["keys"]}
        return answer, {**self._state, **new, "seed": seed, "own_shares": kept}

    def _input(self, request: Mapping[str, Value], vector: Any) -> tuple[Message, Message]:
        """The vector, encoded and masked; private keys and seed are forgotten."""
        roster = self._roster()
        letters = self._members(request, "senders", "letters", SEALED_BYTES, of=roster)
        grid = FixedPoint.for_sum(
            read(self._state, "clients", int, self.who),
            read(request, "bound", float, self.who),
            read(request, "bits", int, self.who),
        )
        bound, length = read(request, "bound", float, self.who), read(request, "length", int, self.who)
        masked = grid.encode(as_vector(vector, length, bound, self.who))
        shares = self._open_letters(roster, letters)
        round = read(self._state, "round", int, self.who)
        pairs = PairKeys(self._secret("mask_key"))
        add_mask(masked, derive_key(self._secret("seed"), "self", round, self.client), 1)
        for other in letters:
            if other != self.client:
                low, high = sorted((self.client, other))
                key = pairs.key(roster[other][KEY_BYTES:], "mask", round, low, high)
                add_mask(masked, key, 1 if self.client == low else -1)
        state: Message = {
            "stage": "input",
            "round": round,
            "threshold": self._state["threshold"],
            "senders": request["senders"],
            "shares": shares,
        }
        return {"masked": masked}, state

    def _reveal(self, request: Mapping[str, Value]) -> tuple[Message, Message]:
        """For each member one share: of the seed if it is among the survivors, else of the mask key. Never both."""
        senders = read(self._state, "senders", np.ndarray, self.who).tolist()
        survivors = set(self._ids(request, "survivors", senders))
        shares, answer = read(self._state, "shares", bytes, self.who), []
        for at, sender in enumerate(senders):
            start = at * PAIR_BYTES + (SHARE_BYTES if sender in survivors else 0)
            answer.append(shares[start : start + SHARE_BYTES])
        return {"shares": b"".join(answer)}, {"stage": "reveal", "round": self._state["round"]}

    def _ids(self, request: Mapping[str, Value], name: str, allowed: list[int] | None) -> list[int]:
        """A list of ids: ascending, this client among them, at least the threshold, and only ``allowed`` ones."""
        given = read(request, name, np.ndarray, self.who)
        ids = given.tolist() if given.ndim == 1 and given.dtype == np.int64 else []
        threshold = read(self._state, "threshold", int, self.who)
        if len(ids) < threshold:
            raise ValueError(f"{self.who}: refuses {name!r} with {len(ids)} of {threshold} needed clients")
        if ids != sorted(set(ids)) or self.client not in ids or ids[0] < 0 or not set(ids) <= set(allowed or ids):
            raise ValueError(f"{self.who}: refuses {name!r} {ids}: must ascend, name it and nobody who is not in")
        return ids

    def _members(
        self, request: Mapping[str, Value], name: str, content: str, size: int, of: Mapping[int, bytes] | None = None
    ) -> dict[int, bytes]:
        """Ids and for each of them ``size`` bytes; with ``of`` nothing for this client itself."""
        ids = self._ids(request, name, None if of is None else list(of))
        clients = read(self._state, "clients", int, self.who)
        data = read(request, content, bytes, self.who)
        filled = [one for one in ids if of is None or one != self.client]
        if len(ids) > clients or len(data) != size * len(filled):
            raise ValueError(
                f"{self.who}: {content!r} holds {len(data)} bytes for {len(filled)} of {clients} clients, "
                f"{size} each are expected"
            )
        parts = {one: data[at * size : (at + 1) * size] for at, one in enumerate(filled)}
        return {one: parts.get(one, b"") for one in ids}

    def _roster(self) -> dict[int, bytes]:
        keys = read(self._state, "keys", bytes, self.who)
        ids = read(self._state, "roster", np.ndarray, self.who).tolist()
        return {one: keys[at * KEYS_BYTES : (at + 1) * KEYS_BYTES] for at, one in enumerate(ids)}

    def _secret(self, name: str) -> bytes:
        return read(self._state, name, bytes, self.who)

    def _open_letters(self, roster: Mapping[int, bytes], letters: Mapping[int, bytes]) -> bytes:
        """The shares in the letters, in their order; this client's own were never sent."""
        round = read(self._state, "round", int, self.who)
        pairs, digest, shares = PairKeys(self._secret("seal_key")), _digest(roster), []
        for sender, letter in letters.items():
            if sender == self.client:
                shares.append(self._secret("own_shares"))
                continue
            key = pairs.key(roster[sender][:KEY_BYTES], "seal", round, sender, self.client)
            plain = unseal(key, letter, _about(round, sender, self.client, digest))
            if plain is None or len(plain) != PAIR_BYTES:
                raise ValueError(
                    f"{self.who}: the shares from client {sender} were changed on the way, or client {sender} was "
                    "shown another list of public keys; nothing is sent"
                )
            shares.append(plain)
        return b"".join(shares)


def _digest(roster: Mapping[int, bytes]) -> bytes:
    return roster_digest(list(roster), list(roster.values()))


def _about(round: int, sender: int, reader: int, digest: bytes) -> bytes:
    """What a letter is bound to: round, sender, reader, and the list of keys that the sender was shown."""
    return context("letter", round, sender, reader) + digest
