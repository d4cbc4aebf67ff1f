"""A secure sum step by step, for the tests that look at its messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fedclust.federation.message import Message, check_message, pack, unpack
from fedclust.privacy.secure_sum import SecureSum

SECRETS = ("seal_key", "mask_key", "seed", "own_shares")


class SecureRun:
    """A sum step by step, with everything that was said and every secret that a client ever held."""

    def __init__(self, vectors: Mapping[int, Any], bound: float = 4096, round: int = 5, **options: Any) -> None:
        self.mode = SecureSum(**options)
        self.vectors = vectors
        self.server = self.mode.server(vectors, 3, bound, round)
        self.states: dict[int, Message] = {client: {} for client in vectors}
        self.secrets: dict[int, dict[str, bytes]] = {client: {} for client in vectors}
        self.requests: dict[str, dict[int, Message]] = {}
        self.replies: dict[str, dict[int, Message]] = {}

    def ask(self, step: str, silent: tuple[int, ...] = ()) -> None:
        """Opens the step; those who are silent send no reply."""
        self.requests[step], self.replies[step] = self.server.requests(step), {}
        for client in self.requests[step]:
            if client not in silent:
                self.server.receive(client, self.answer(step, client))

    def answer(self, step: str, client: int) -> Message:
        # As on a wire and in a store: flat messages that survive being written and read.
        request = unpack(pack(check_message(self.requests[step][client], "server")))
        side = self.mode.client(client, unpack(pack(self.states[client])))
        reply = side.reply(request, self.vectors[client] if step == "input" else None)
        self.states[client] = check_message(side.state, "state")
        held = {name: value for name, value in side.state.items() if name in SECRETS}
        self.secrets[client].update(held)  # type: ignore[arg-type]
        self.replies[step][client] = unpack(pack(check_message(reply, f"client {client}")))
        return self.replies[step][client]

    def all_but(self, *last: str) -> SecureRun:
        for step in self.mode.steps:
            if step not in last:
                self.ask(step)
        return self


@pytest.fixture
def secure_run() -> type[SecureRun]:
    """To start such a sum with."""
    return SecureRun
