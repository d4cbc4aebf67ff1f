"""The secure sum as a whole: right sums by hand, clients that leave in every step, what the server holds."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from fedclust.federation.message import message_bytes
from fedclust.privacy import secure_sum_client
from fedclust.privacy.aggregation import TooFewClients
from fedclust.privacy.masking import PairKeys, add_mask, public_key
from fedclust.privacy.secure_sum import SecureSum
from fedclust.privacy.sums import payload_bytes, sum_vectors

FOUR = {0: [1.0, -2.0, 0.5], 1: [10.0, 20.0, -0.25], 2: [100.0, -200.0, 4.0], 3: [-1000.0, 2000.0, 8.0]}
SECRETS = ("seal_key", "mask_key", "seed", "own_shares")


def test_the_sum_of_four(secure_run: Any) -> None:
    run = secure_run(FOUR).all_but()
    result = run.server.result()
    assert result.total.tolist() == [-889.0, 1818.0, 12.25]
    assert result.mean.tolist() == [-222.25, 454.5, 3.0625]
    assert (result.survivors, result.count) == ((0, 1, 2, 3), 4)
    assert run.server.result() is result


def test_what_a_client_does_once_per_step_does_not_grow_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    digests, loaded = [], []
    digest, load = secure_sum_client.roster_digest, secure_sum_client.PairKeys
    monkeypatch.setattr(secure_sum_client, "roster_digest", lambda *a: digests.append(1) or digest(*a))
    monkeypatch.setattr(secure_sum_client, "PairKeys", lambda key: loaded.append(1) or load(key))
    for clients in (4, 8):
        digests.clear()
        loaded.clear()
        total = sum_vectors({one: [float(one)] for one in range(clients)}, "secure_sum").total
        assert total.tolist() == [clients * (clients - 1) / 2]
        assert (len(digests), len(loaded)) == (2 * clients, 3 * clients)


@pytest.mark.parametrize("bits", [32, 64])
def test_one_of_four_leaves_after_the_masks_are_exchanged(bits: int) -> None:
    for gone in FOUR:
        result = sum_vectors(FOUR, "secure_sum", dropped=[gone], threshold=3, bits=bits, bound=2048)
        rest = [np.array(vector) for client, vector in FOUR.items() if client != gone]
        assert result.total.tolist() == sum(rest).tolist()
        assert result.survivors == tuple(client for client in FOUR if client != gone)
        assert result.count == 3
        assert result.mean.tolist() == (sum(rest) / 3).tolist()


@pytest.mark.parametrize("step", ["advertise", "share_keys", "input", "reveal"])
def test_two_of_four_leave_and_nothing_is_given(step: str) -> None:
    with pytest.raises(TooFewClients, match=rf"step '{step}': 2 of 3 needed .* without a reply: \[1, 2\]"):
        sum_vectors(FOUR, "secure_sum", dropped={1: step, 2: step}, threshold=3)


@pytest.mark.parametrize("step", ["advertise", "share_keys", "input", "reveal"])
def test_one_leaves_in_any_step(step: str) -> None:
    result = sum_vectors(FOUR, "secure_sum", dropped={1: step}, threshold=3)
    # Who leaves in the last step has sent its vector: it is in the sum.
    survivors = (0, 1, 2, 3) if step == "reveal" else (0, 2, 3)
    assert result.survivors == survivors
    assert result.total.tolist() == sum(np.array(FOUR[client]) for client in survivors).tolist()


def test_one_leaves_in_every_step() -> None:
    vectors = {client: [float(2**client), -1.0] for client in range(9)}
    dropped = {0: "advertise", 3: "share_keys", 5: "input", 8: "reveal"}
    result = sum_vectors(vectors, "secure_sum", dropped=dropped)
    assert result.survivors == (1, 2, 4, 6, 7, 8)
    assert result.total.tolist() == [2.0 + 4 + 16 + 64 + 128 + 256, -6.0]


def test_leaving_bit_by_bit_below_the_threshold_is_refused() -> None:
    with pytest.raises(TooFewClients, match="step 'reveal': 2 of 3 needed"):
        sum_vectors(FOUR, "secure_sum", dropped={0: "share_keys", 2: "reveal"}, threshold=3)


def test_a_refused_step_stays_open_for_late_replies_and_reveals_nothing(secure_run: Any) -> None:
    run = secure_run(FOUR, threshold=3).all_but("input", "reveal")
    run.ask("input", silent=(1, 2))
    with pytest.raises(TooFewClients):
        run.server.requests("reveal")
    run.server.receive(2, run.answer("input", 2))
    run.ask("reveal")
    assert run.server.result().survivors == (0, 2, 3)


def test_a_late_vector_is_neither_used_nor_unmasked(secure_run: Any) -> None:
    run = secure_run(FOUR, threshold=3).all_but("input", "reveal")
    run.ask("input", silent=(1,))
    late = run.answer("input", 1)
    run.ask("reveal")
    with pytest.raises(ValueError, match="client 1: its reply to step 'input' of round 5 is not used, step 'reveal'"):
        run.server.receive(1, late)
    assert run.server.result().total.tolist() == [-899.0, 1798.0, 12.5]
    with pytest.raises(ValueError, match="no step is open"):
        run.server.receive(1, late)
    # With the mask key of client 1, which the server has recovered by now, all masks of pairs can be taken off ...
    bare = np.array(late["masked"])
    for other in (0, 2, 3):
        public = public_key(run.secrets[other]["mask_key"])
        key = PairKeys(run.secrets[1]["mask_key"]).key(public, "mask", 5, *sorted((1, other)))
        add_mask(bare, key, -1 if other > 1 else 1)
    # ... and the mask of its seed still hides every element.
    coded = run.server.grid.encode(np.array(FOUR[1]))
    assert not (bare == coded).any()
    # No client that has helped to remove client 1's masks now also gives shares of its seed.
    asked = {"step": "reveal", "round": 5, "survivors": np.array([0, 1, 2, 3])}
    for client in (0, 2, 3):
        with pytest.raises(ValueError, match=f"client {client}: refuses step 'reveal' of round 5"):
            run.mode.client(client, run.states[client]).reply(asked)


def test_for_each_member_one_share_and_never_both(secure_run: Any) -> None:
    run = secure_run(FOUR, threshold=3).all_but("input", "reveal")
    run.ask("input", silent=(1,))
    kept = {client: run.states[client]["shares"] for client in (0, 2, 3)}
    run.ask("reveal")
    for client in (0, 2, 3):
        given, both = run.replies["reveal"][client]["shares"], kept[client]
        assert len(given) == 4 * 33
        for member in range(4):
            key_share, seed_share = both[66 * member : 66 * member + 33], both[66 * member + 33 : 66 * member + 66]
            assert given[33 * member : 33 * member + 33] == (key_share if member == 1 else seed_share)


def test_the_server_never_holds_a_secret_or_a_vector(secure_run: Any) -> None:
    run = secure_run(FOUR, threshold=3)
    for step in run.mode.steps:
        run.ask(step, silent=(1,) if step == "input" else ())
        held = pickle.dumps(run.server)
        for client, secrets in run.secrets.items():
            for name, secret in secrets.items():
                assert secret not in held, f"{name} of client {client} after {step}"
            assert run.server.grid.encode(np.array(FOUR[client])).tobytes() not in held
    run.server.result()
    assert {name for secrets in run.secrets.values() for name in secrets} == set(SECRETS)
    held = pickle.dumps(run.server)
    # The seeds and the one mask key that it recovered are not kept either.
    assert not [name for secrets in run.secrets.values() for name, secret in secrets.items() if secret in held]


def test_no_message_holds_a_secret_or_a_vector(secure_run: Any) -> None:
    run = secure_run(FOUR).all_but()
    sent = pickle.dumps([run.requests, run.replies])
    assert not [name for secrets in run.secrets.values() for name, secret in secrets.items() if secret in sent]
    for client, vector in FOUR.items():
        coded = run.server.grid.encode(np.array(vector))
        assert coded.tobytes() not in sent
        assert not (run.replies["input"][client]["masked"] == coded).any()


def test_clients_forget_their_secrets(secure_run: Any) -> None:
    run = secure_run(FOUR).all_but("reveal")
    assert all(not set(SECRETS) & set(state) for state in run.states.values())
    run.ask("reveal")
    assert all(state == {"stage": "reveal", "round": 5} for state in run.states.values())


def test_masks_differ_between_rounds_and_clients(secure_run: Any) -> None:
    same = {client: [1.0, 2.0, 3.0] for client in range(3)}
    masked = []
    for round in (1, 2):
        run = secure_run(same, round=round).all_but()
        masked += [run.replies["input"][client]["masked"] for client in same]
        assert run.server.result().total.tolist() == [3.0, 6.0, 9.0]
    assert len(np.unique(np.concatenate(masked))) == 6 * 3


def test_negative_values_and_the_bound_itself() -> None:
    vectors = {0: [-4.0, 4.0, -4.0], 1: [-4.0, 4.0, 4.0]}
    for bits in (32, 64):
        assert sum_vectors(vectors, "secure_sum", bits=bits, bound=4.0).total.tolist() == [-8.0, 8.0, 0.0]


def test_whole_numbers_are_exact() -> None:
    big = 2**50 - 1
    vectors = {client: np.array([big, -big, client]) for client in range(7)}
    assert sum_vectors(vectors, "secure_sum").total.tolist() == [7 * big, -7 * big, 21]
    small = {client: torch.tensor([10**7, -(10**7), client]) for client in range(20)}
    result = sum_vectors(small, "secure_sum", bits=32)
    assert result.total.tolist() == [2 * 10**8, -2 * 10**8, 190]


@pytest.mark.parametrize("bits", [32, 64])
def test_the_error_is_at_most_half_a_step_each(bits: int) -> None:
    generator = np.random.default_rng(0)
    vectors = {client: generator.uniform(-3, 3, 500) for client in range(12)}
    result = sum_vectors(vectors, "secure_sum", bits=bits, bound=3.0, dropped=[4])
    # 12 values of 3 in 2**31 − 1 or 2**53 steps: the step is 2**-25 or 2**-47.
    assert result.max_error == 12 * 2.0 ** (-26 if bits == 32 else -48)
    exact = [math.fsum(vectors[client][at] for client in result.survivors) for at in range(500)]
    error = np.abs(result.total - exact)
    assert 0 < error.max() <= result.max_error


def test_two_clients() -> None:
    assert sum_vectors({7: [1.5], 3: [-4.0]}, "secure_sum").total.tolist() == [-2.5]
    with pytest.raises(TooFewClients, match="1 of 2 needed"):
        sum_vectors({7: [1.5], 3: [-4.0]}, "secure_sum", dropped=[3])


def test_one_client_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 2 clients, got 1: the sum of one vector is that vector"):
        sum_vectors({7: [1.5]}, "secure_sum")


@pytest.mark.parametrize("threshold", [0, 1, 2, 5, True, 2.5])
def test_thresholds_that_protect_nothing_or_cannot_be_met(threshold: Any) -> None:
    with pytest.raises(ValueError, match="threshold must lie between 3 and 4 for 4 clients"):
        SecureSum(threshold=threshold).server(range(4), 3, 1.0)
    request = {"step": "advertise", "round": 0, "clients": 4, "threshold": threshold}
    with pytest.raises(ValueError, match="client 1: "):
        SecureSum().client(1).reply(request)


@pytest.mark.parametrize(("clients", "needed"), [(2, 2), (3, 2), (4, 3), (5, 3), (100, 51)])
def test_the_default_threshold_is_more_than_half(clients: int, needed: int) -> None:
    assert SecureSum().server(range(clients), 1, 1.0).needed == needed


def test_bytes_are_those_of_the_messages(secure_run: Any) -> None:
    run = secure_run(FOUR).all_but()
    result = sum_vectors(FOUR, "secure_sum", round=5)
    for client in FOUR:
        up = [run.replies[step][client] for step in run.mode.steps]
        down = [run.requests[step][client] for step in run.mode.steps]
        assert result.bytes_up[client] == sum(message_bytes(message) for message in up)
        assert result.bytes_down[client] == sum(message_bytes(message) for message in down)
    # Step names and round numbers, 30 + 4·8; two keys; three letters of 94; commitment; 3 words; four shares.
    assert result.bytes_up[0] == 30 + 32 + 64 + 3 * 94 + 32 + 24 + 4 * 33
    mixed = {"a": torch.zeros(3), "b": np.zeros(2), "c": "é", "d": b"12", "e": 1, "f": 1.0, "g": None}
    assert payload_bytes(mixed) == message_bytes(mixed) == 12 + 16 + 2 + 2 + 8 + 8


def test_a_longer_vector_and_more_clients() -> None:
    generator = np.random.default_rng(1)
    vectors = {client: generator.integers(-1000, 1000, 70_000) for client in range(0, 24, 2)}
    result = sum_vectors(vectors, "secure_sum", dropped={4: "input", 8: "share_keys", 10: "reveal"}, bits=32)
    assert result.survivors == (0, 2, 6, 10, 12, 14, 16, 18, 20, 22)
    assert np.array_equal(result.total, sum(vectors[client] for client in result.survivors))
