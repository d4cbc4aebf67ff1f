"""Sums over clients whose vectors the server may not read: the steps of `fedclust.privacy` carried in messages."""

from __future__ import annotations

from collections.abc import Mapping

from fedclust.federation.algorithm import Server
from fedclust.federation.message import Value
from fedclust.privacy.aggregation import Aggregation, Sum


def sum_over_clients(
    server: Server,
    aggregation: Aggregation,
    to: Mapping[int, Mapping[str, Value]],
    length: int,
    bound: float,
    action: str,
) -> Sum:
    """Runs one sum; who fails in a step has dropped out of it.

    Args:
        server: Carries the messages.
        aggregation: The mode.
        to: Client id → what its action needs to make its vector; sent with the step "input" only.
        length: Of the vectors.
        bound: Largest absolute value of an element.
        action: Answers one step: see `lightning_modules.summing.answer`.

    Raises:
        fedclust.privacy.aggregation.TooFewClients: If fewer are left than the mode needs.
    """
    aggregator = aggregation.server(to, length, bound, server.context.round)
    for step in aggregation.steps:
        requests = aggregator.requests(step)
        messages = {
            client: {**request, **(to[client] if step == "input" else {})} for client, request in requests.items()
        }
        server.ask(action, messages, shared={"mode": aggregation.mode}, on_reply=aggregator.receive)
    return aggregator.result()
