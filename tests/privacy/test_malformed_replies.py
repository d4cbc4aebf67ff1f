"""A reply that does not fit costs its client, or the round, and leaves nothing in a sum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedclust
from fedclust.federation.client import action
from fedclust.federation.errors import ClientError, FederationError
from lightning_modules import Classifier


class Cheat(Classifier):
    """Client 1 sends something else in one step of the sum."""

    step = ""
    part = ""

    @action
    def contribute_weights(self, message: Any, ctx: Any) -> Any:
        """What Classifier answers, spoiled."""
        reply = super().contribute_weights(message, ctx)
        if ctx.id == 1 and message["step"] == self.step:
            size = 3 if self.part == "chunk/0" else len(reply[self.part]) - (self.part == "letters")
            reply[self.part] = bytes(size)
        return reply


CASES = [
    ("secure_sum", "share_keys", "letters", "client 1 failed in 'contribute_weights'"),
    ("secure_sum", "reveal", "shares", "a share of client 0's secret is wrong; no sum is given. One of clients"),
    ("ckks", "input", "chunk/0", "client 1 failed in 'contribute_weights'"),
]


def train(cheat: type[Cheat], mode: str, on_failure: Any) -> fedclust.Result:
    data = fedclust.FederatedDataModule("digits", fedclust.Iid(5), seed=0)
    backend = fedclust.InProcess(on_failure=on_failure)
    method = fedclust.FedAvg(aggregation=mode)  # type: ignore[arg-type]
    return fedclust.federate(method, cheat("linear"), data, rounds=1, backend=backend, progress=False)


@pytest.mark.parametrize(("mode", "step", "part", "note"), CASES)
def test_a_bad_reply_in_a_protected_sum_costs_its_client_or_the_round(
    mode: str, step: str, part: str, note: str
) -> None:
    if mode == "ckks":
        pytest.importorskip("tenseal")
    cheat = type("Cheat", (Cheat,), {"step": step, "part": part})
    result = train(cheat, mode, "skip")
    assert any(note in text for text in result.notes), result.notes
    stays = any("the model stays as it was" in text for text in result.notes)
    assert stays == (part == "shares")
    with pytest.raises(FederationError, match=r"client 1|One of clients") as caught:
        train(cheat, mode, "raise")
    assert isinstance(caught.value, ClientError) == (part != "shares")


def test_a_refused_ciphertext_leaves_nothing_in_the_sum() -> None:
    ts = pytest.importorskip("tenseal")
    from fedclust.privacy.ckks import CKKSSum

    mode, vectors = CKKSSum(), {client: np.full(6000, (client + 1) / 8) for client in range(4)}
    for spoiled in ("chunk/0", "chunk/1"):
        server = mode.server(vectors, 6000, 1.0)
        states: dict[int, Any] = {client: {} for client in vectors}
        for step in mode.steps:
            for client, request in server.requests(step).items():
                side = mode.client(client, states[client])
                reply, states[client] = side.reply(request, vectors[client]), side.state
                if client == 0 and step == "input":
                    own = ts.context_from(request["context"])
                    bad = {**reply, spoiled: ts.ckks_vector(own, [0.1] * 4096, scale=2.0**40).serialize()}
                    if spoiled == "chunk/1":
                        bad[spoiled] = ts.ckks_vector(own, [0.1] * (6000 - 4096), scale=2.0**40).serialize()
                    with pytest.raises(ValueError, match=r"client 0: needs ciphertexts of \(scale, polynomials"):
                        server.receive(client, bad)
                server.receive(client, reply)
        assert np.abs(server.result().total - sum(vectors.values())).max() <= server.max_error


def test_no_context_of_the_encryption_is_named() -> None:
    pytest.importorskip("tenseal")
    from fedclust.privacy.ckks import CKKSSum

    server = CKKSSum().server((3, 4), 2, 1.0)
    server.requests("advertise")
    for context in (b"", b"abc"):
        with pytest.raises(ValueError, match="client 3: what was sent is no context of the encryption"):
            server.receive(3, {"step": "advertise", "round": 0, "context": context})
