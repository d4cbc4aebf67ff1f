"""The client's side of a sum that the server may not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message
from fedclust.privacy.sums import make_aggregation

_VAULT = "sum/"


def answer(message: Message, ctx: ClientContext, vector: Callable[[], Any]) -> Message:
    """Answers one step of a sum; keys stay in the client's vault.

    Args:
        message: The server's request, with the name of the mode under "mode".
        ctx: The client's.
        vector: Makes what the client adds; called in the step "input" only.
    """
    start = len(_VAULT)
    known = {name[start:]: value for name, value in ctx.vault.items() if name.startswith(_VAULT)}
    side = make_aggregation(str(message["mode"])).client(ctx.id, known)
    reply = side.reply(message, vector() if message["step"] == "input" else None)
    for name in known:
        del ctx.vault[_VAULT + name]
    ctx.vault |= {_VAULT + name: value for name, value in side.state.items()}
    return reply
