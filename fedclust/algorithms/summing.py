"""Sums over clients whose vectors the server may not read: the steps of `fedclust.privacy` carried in messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from fedclust.federation.algorithm import Server
from fedclust.federation.errors import FederationError, RefusedReplyError, RoundFailedError
from fedclust.federation.message import Message, Value
from fedclust.privacy.aggregation import Aggregation, Sum, WrongReplies


def sum_over_clients(
    server: Server,
    aggregation: Aggregation,
    to: Mapping[int, Mapping[str, Value]],
    length: int,
    bound: float,
    action: str,
    check: Callable[[Sequence[int]], None] = lambda survivors: None,
) -> Sum:
    """Runs one sum; who fails in a step, or sends what does not fit, has dropped out of it.

    Args:
        server: Carries the messages.
        aggregation: The mode.
        to: Client id → what its action needs to make its vector; sent with the step "input" only.
        length: Of the vectors.
        bound: Largest absolute value of an element.
        action: Answers one step: see `lightning_modules.summing.answer`.
        check: Told who is in the sum before its last step reveals it; may raise TooFewClients.

    Raises:
        fedclust.privacy.aggregation.NoSum: If fewer are left than the mode needs, `check` refuses them, or (where
            failures are skipped) what they sent in the last step gives no sum.
        FederationError: For such replies where failures are not skipped.
    """
    aggregator = aggregation.server(to, length, bound, server.context.round)

    def receive(client: int, reply: Message) -> None:
        try:
            aggregator.receive(client, reply)
        except ValueError as error:
            raise RefusedReplyError(str(error)) from error

    for step in aggregation.steps:
        requests = aggregator.requests(step)
        messages = {
            client: {**request, **(to[client] if step == "input" else {})} for client, request in requests.items()
        }
        if step == aggregation.steps[-1]:
            check(aggregator.alive)
        # All of those who were asked dropping out is for the mode to judge, which does so when it closes the step.
        with suppress(RoundFailedError):
            server.ask(action, messages, shared={"mode": aggregation.mode}, on_reply=receive)
    try:
        return aggregator.result()
    except WrongReplies as error:
        if server.backend.on_failure == "raise":
            raise FederationError(str(error)) from error
        raise


def require_two_clients(server: Server) -> None:
    """Refuses protected sums where no round can have two clients.

    Raises:
        ValueError: Naming what is too small.
    """
    if len(server.clients) < 2:
        raise ValueError("a protected sum needs at least 2 clients with rows, there is 1: use aggregation: plain")
    if server.cohort_size < 2:
        raise ValueError(
            "a protected sum needs at least 2 clients in a round; cohort_size or participation give "
            f"{server.cohort_size} of {len(server.clients)}"
        )
