"""InProcess: the order in which clients run changes neither the order of replies nor their content."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedclust.federation.backend import InProcess, in_order
from fedclust.federation.errors import ClientError


@pytest.fixture
def pair(toy: Any, blobs: Any, shuffled: Any) -> list[InProcess]:
    backends = []
    for backend in (InProcess(), shuffled(seed=4)):
        data = blobs((4, 6, 8, 10, 12), val_fraction=0.0, test_fraction=0.0)
        module = toy.client()
        module.build(data.input_shape, None)
        backend.connect(module, data, seed=5, device=torch.device("cpu"), precision="32-true")
        backends.append(backend)
    return backends


def test_replies_are_equal_and_in_client_order(pair: list[Any]) -> None:
    received: list[list[tuple[int, list[float]]]] = [[], []]
    for backend, seen in zip(pair, received, strict=True):
        backend.ask(
            "pull", {client: {} for client in range(5)}, shared={"w": torch.zeros(6)},
            on_reply=lambda client, reply, seen=seen: seen.append((client, reply["w"].tolist())),
        )  # fmt: skip
    assert pair[1].ran != sorted(pair[1].ran)
    assert [client for client, _ in received[1]] == [0, 1, 2, 3, 4]
    assert received[0] == received[1]
    kept = [backend.ask("pull", {c: {} for c in range(5)}, shared={"w": torch.zeros(6)}) for backend in pair]
    for client in range(5):
        assert torch.equal(kept[0][client]["w"], kept[1][client]["w"])
    assert len({tuple(reply["w"].tolist()) for reply in kept[0].values()}) == 5


def test_the_first_failure_by_client_id_is_named_whatever_ran_first(pair: list[Any]) -> None:
    for backend in pair:
        backend.ask("pull", {c: {} for c in range(5)}, shared={"w": torch.zeros(6)})
        with pytest.raises(ClientError, match=r"client 1,"):
            backend.ask("spoil", {c: {} for c in range(5)}, shared={"fail": torch.tensor([4, 1, 3])})


def test_in_order_yields_as_soon_as_it_can() -> None:
    class One:
        def __init__(self, client: int) -> None:
            self.client = client

    log: list[str] = []

    def outcomes() -> Any:
        for client in (2, 0, 1):
            log.append(f"ran {client}")
            yield One(client)

    for outcome in in_order(outcomes(), [0, 1, 2]):
        log.append(f"got {outcome.client}")
    assert log == ["ran 2", "ran 0", "got 0", "ran 1", "got 1", "got 2"]
