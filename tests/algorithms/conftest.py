"""Runs of FedDCN on the blobs, and a log of what its server asked."""

from __future__ import annotations

from typing import Any

import pytest

from fedclust.federation.backend import Backend
from fedclust.federation.loop import FederatedLoop


@pytest.fixture
def run(feddcn: Any, dcn: Any, blobs: Any, trainer: Any) -> Any:
    """Fits FedDCN on the blobs; `algorithm`, `client` and `data` are changes to the defaults."""

    def start(
        rounds: int = 1, *, algorithm: Any = (), client: Any = (), data: Any = None, **more: Any
    ) -> FederatedLoop:
        loop = FederatedLoop(feddcn(**dict(algorithm)), dcn(**dict(client)), more.pop("backend", None), **more)
        trainer(rounds).fit(loop, datamodule=blobs() if data is None else data)
        return loop

    return start


@pytest.fixture
def asked(monkeypatch: Any) -> list[tuple[list[str], dict[str, Any], dict[int, Any]]]:
    """Every question of a run: actions, shared values, and the replies by client."""
    log: list[Any] = []
    original = Backend.ask

    def ask(self: Any, actions: Any, to: Any, *, shared: Any = None, on_reply: Any = None) -> Any:
        names = [actions] if isinstance(actions, str) else list(actions)
        replies: dict[int, Any] = {}
        log.append((names, dict(shared or {}), replies))

        def keep(client: int, reply: Any) -> None:
            replies[client] = reply
            if on_reply is not None:
                on_reply(client, reply)

        original(self, actions, to, shared=shared, on_reply=keep)
        return {} if on_reply is not None else dict(replies)

    monkeypatch.setattr(Backend, "ask", ask)
    return log
