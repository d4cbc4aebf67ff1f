from __future__ import annotations

import pytest

from fedclust.federation.client import ClientModule, action
from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message


@pytest.mark.parametrize("name", ["train", "eval", "forward", "log", "parameters"])
def test_an_action_may_not_replace_a_method_of_lightning(name: str) -> None:
    @action
    def reply(self: ClientModule, message: Message, ctx: ClientContext) -> Message:
        return {}

    with pytest.raises(TypeError, match=f"Shadow.*{name}.*rename"):
        type("Shadow", (ClientModule,), {name: reply})


def test_actions_lists_marked_methods_only() -> None:
    class Client(ClientModule):
        @action
        def hello(self, message: Message, ctx: ClientContext) -> Message:
            return {}

        def helper(self) -> None: ...

    assert Client.actions() == ["hello"]


def test_an_override_of_an_action_is_an_action() -> None:
    class Client(ClientModule):
        @action
        def hello(self, message: Message, ctx: ClientContext) -> Message:
            return {}

        @action
        def goodbye(self, message: Message, ctx: ClientContext) -> Message:
            return {}

    class Polite(Client):
        goodbye = None  # type: ignore[assignment]

        def hello(self, message: Message, ctx: ClientContext) -> Message:
            return {**super().hello(message, ctx), "please": 1}

    assert Polite.actions() == ["hello"]
    assert Polite().act("hello", {}, None) == {"please": 1}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Polite has no action"):
        Polite().act("goodbye", {}, None)  # type: ignore[arg-type]
