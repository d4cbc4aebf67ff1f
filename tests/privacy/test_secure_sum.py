"""The secure sum as a whole: right sums by hand, clients that leave in every step, refusals, what the server holds."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fedclust.federation.message import Message, check_message, message_bytes, pack, unpack
from fedclust.privacy.aggregation import TooFewClients
from fedclust.privacy.masking import KEY_BYTES, add_mask, pair_key, public_key
from fedclust.privacy.secure_sum import SecureSum
from fedclust.privacy.secure_sum_server import SecureSumServer
from fedclust.privacy.sums import payload_bytes, sum_vectors

FOUR = {0: [1.0, -2.0, 0.5], 1: [10.0, 20.0, -0.25], 2: [100.0, -200.0, 4.0], 3: [-1000.0, 2000.0, 8.0]}
SECRETS = ("seal_key", "mask_key", "seed", "own_shares")


class Run:
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
        """Opens the step; those who are silent get no request and send no reply."""
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

    def all_but(self, *last: str) -> Run:
        for step in self.mode.steps:
            if step not in last:
                self.ask(step)
        return self


def test_the_sum_of_four() -> None:
    run = Run(FOUR).all_but()
    result = run.server.result()
    assert result.total.tolist() == [-889.0, 1818.0, 12.25]
    assert result.mean.tolist() == [-222.25, 454.5, 3.0625]
    assert (result.survivors, result.count) == ((0, 1, 2, 3), 4)
    assert run.server.result() is result


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


def test_a_refused_step_stays_open_for_late_replies_and_reveals_nothing() -> None:
    run = Run(FOUR, threshold=3).all_but("input", "reveal")
    run.ask("input", silent=(1, 2))
    with pytest.raises(TooFewClients):
        run.server.requests("reveal")
    run.server.receive(2, run.answer("input", 2))
    run.ask("reveal")
    assert run.server.result().survivors == (0, 2, 3)


def test_a_late_vector_is_neither_used_nor_unmasked() -> None:
    run = Run(FOUR, threshold=3).all_but("input", "reveal")
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
        key = pair_key(run.secrets[1]["mask_key"], public, "mask", 5, *sorted((1, other)))
        add_mask(bare, key, -1 if other > 1 else 1)
    # ... and the mask of its seed still hides every element.
    coded = run.server.grid.encode(np.array(FOUR[1]))
    assert not (bare == coded).any()
    # No client that has helped to remove client 1's masks now also gives shares of its seed.
    asked = {"step": "reveal", "round": 5, "survivors": np.array([0, 1, 2, 3])}
    for client in (0, 2, 3):
        with pytest.raises(ValueError, match=f"client {client}: refuses step 'reveal' of round 5"):
            run.mode.client(client, run.states[client]).reply(asked)


def test_for_each_member_one_share_and_never_both() -> None:
    run = Run(FOUR, threshold=3).all_but("input", "reveal")
    run.ask("input", silent=(1,))
    kept = {client: run.states[client]["shares"] for client in (0, 2, 3)}
    run.ask("reveal")
    for client in (0, 2, 3):
        given, both = run.replies["reveal"][client]["shares"], kept[client]
        assert len(given) == 4 * 33
        for member in range(4):
            key_share, seed_share = both[66 * member : 66 * member + 33], both[66 * member + 33 : 66 * member + 66]
            assert given[33 * member : 33 * member + 33] == (key_share if member == 1 else seed_share)


def test_the_server_never_holds_a_secret_or_a_vector() -> None:
    run = Run(FOUR, threshold=3)
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


def test_no_message_holds_a_secret_or_a_vector() -> None:
    run = Run(FOUR).all_but()
    sent = pickle.dumps([run.requests, run.replies])
    assert not [name for secrets in run.secrets.values() for name, secret in secrets.items() if secret in sent]
    for client, vector in FOUR.items():
        coded = run.server.grid.encode(np.array(vector))
        assert coded.tobytes() not in sent
        assert not (run.replies["input"][client]["masked"] == coded).any()


def test_clients_forget_their_secrets() -> None:
    run = Run(FOUR).all_but("reveal")
    assert all(not set(SECRETS) & set(state) for state in run.states.values())
    run.ask("reveal")
    assert all(state == {"stage": "reveal", "round": 5} for state in run.states.values())


def test_masks_differ_between_rounds_and_clients() -> None:
    same = {client: [1.0, 2.0, 3.0] for client in range(3)}
    masked = []
    for round in (1, 2):
        run = Run(same, round=round).all_but()
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


@pytest.mark.parametrize(
    ("vector", "error"),
    [
        ([1.0, 2.0], r"client 2: needs a vector of 3 numbers, got shape \(2,\)"),
        ([[1.0, 2.0, 3.0]], r"client 2: needs a vector of 3 numbers, got shape \(1, 3\)"),
        ([1.0, float("nan"), float("inf")], "client 2: 2 of 3 values are NaN or infinite"),
        ([1.0, -4096.5, 5000.0], r"client 2: value -4096.5 at position 1 lies outside the bound ±4096 \(2 do\)"),
        (["a", "b", "c"], "client 2: needs a vector of 3 numbers"),
        ([1j, 0, 0], "client 2: needs a vector of 3 numbers"),
        ([True, False, True], "client 2: needs a vector of 3 numbers"),
        (None, "client 2: step 'input' needs the vector"),
    ],
)
def test_bad_vectors_are_refused_and_their_client_drops_out(vector: Any, error: str) -> None:
    run = Run({**FOUR, 2: vector}, threshold=3).all_but("input", "reveal")
    before = dict(run.states[2])
    with pytest.raises(ValueError, match=error):
        run.ask("input")
    assert run.states[2].keys() == before.keys()
    run.server.receive(3, run.answer("input", 3))
    run.ask("reveal")
    assert run.server.result().survivors == (0, 1, 3)


def test_whole_numbers_that_float64_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"client 1: value 9007199254740994 at position 0 lies outside ±2\*\*53"):
        sum_vectors({0: [1], 1: np.array([2**53 + 2])}, "secure_sum")


def test_changed_shares_are_refused() -> None:
    run = Run(FOUR, threshold=3).all_but("input", "reveal")
    run.requests["input"] = run.server.requests("input")
    run.replies["input"] = {}
    letters = bytearray(run.requests["input"][0]["letters"])  # type: ignore[arg-type]
    letters[-1] ^= 1
    run.requests["input"][0]["letters"] = bytes(letters)
    with pytest.raises(ValueError, match="client 0: the shares from client 3 were changed on the way"):
        run.answer("input", 0)
    # Nothing was masked yet: with the right letters the client goes on.
    letters[-1] ^= 1
    run.requests["input"][0]["letters"] = bytes(letters)
    assert set(run.answer("input", 0)) == {"step", "round", "masked"}


def test_another_list_of_keys_for_one_client_is_noticed() -> None:
    run = Run(FOUR).all_but("share_keys", "input", "reveal")
    run.requests["share_keys"], run.replies["share_keys"] = run.server.requests("share_keys"), {}
    keys = run.requests["share_keys"][0]["keys"]
    assert isinstance(keys, bytes)
    run.requests["share_keys"][0]["keys"] = keys[: -2 * KEY_BYTES] + public_key(b"x" * 32) + public_key(b"y" * 32)
    for client in FOUR:
        run.server.receive(client, run.answer("share_keys", client))
    run.requests["input"], run.replies["input"] = run.server.requests("input"), {}
    with pytest.raises(ValueError, match=r"client 1: the shares from client 0 were .* another list of public keys"):
        run.answer("input", 1)


@pytest.mark.parametrize("swap", ["own", "twice"])
def test_a_list_that_changes_a_clients_own_keys_is_refused(swap: str) -> None:
    run = Run(FOUR).all_but("share_keys", "input", "reveal")
    run.requests["share_keys"] = run.server.requests("share_keys")
    keys = run.requests["share_keys"][0]["keys"]
    assert isinstance(keys, bytes)
    parts = [keys[64 * at : 64 * at + 64] for at in range(4)]
    parts[0 if swap == "own" else 1] = parts[3]
    run.requests["share_keys"][0]["keys"] = b"".join(parts)
    with pytest.raises(ValueError, match="client 0: the list of public keys changes its own or holds one twice"):
        run.answer("share_keys", 0)


def test_wrong_shares_are_noticed() -> None:
    for member, silent in ((2, ()), (1, (1,))):
        run = Run(FOUR, threshold=3).all_but("input", "reveal")
        run.ask("input", silent=silent)
        run.requests["reveal"], run.replies["reveal"] = run.server.requests("reveal"), {}
        for client in run.requests["reveal"]:
            reply = run.answer("reveal", client)
            if client == 0:
                shares = bytearray(reply["shares"])  # type: ignore[arg-type]
                shares[33 * member + 32] ^= 1
                reply["shares"] = bytes(shares)
            run.server.receive(client, reply)
        with pytest.raises(ValueError, match=f"a share of client {member}'s secret is wrong; no sum is given"):
            run.server.result()


def test_masks_that_do_not_cancel_give_no_vector() -> None:
    run = Run(FOUR).all_but("reveal")
    run.server._masked += np.uint64(2**60)
    run.ask("reveal")
    with pytest.raises(ValueError, match="3 of 3 elements of the sum exceed 4 times the bound"):
        run.server.result()


@pytest.mark.parametrize("survivors", [[0, 1], [0, 1, 2, 3, 4], [1, 2, 3], [0, 2, 1], [0, 0, 1, 2], [-1, 0, 1, 2]])
def test_clients_refuse_lists_of_survivors_that_cannot_be(survivors: list[int]) -> None:
    run = Run(FOUR, threshold=3).all_but("reveal")
    request = {"step": "reveal", "round": 5, "survivors": np.array(survivors)}
    with pytest.raises(ValueError, match="client 0: refuses 'survivors'"):
        run.mode.client(0, run.states[0]).reply(request)


def test_a_client_answers_each_step_once_and_in_order() -> None:
    run = Run(FOUR)
    for step, skipped in (("share_keys", "nothing"), ("input", "nothing"), ("reveal", "nothing")):
        with pytest.raises(ValueError, match=f"client 0: refuses step '{step}' of round 5; it is at '{skipped}'"):
            run.mode.client(0).reply({"step": step, "round": 5})
    for step in run.mode.steps:
        run.ask(step)
        if step != "advertise":
            with pytest.raises(ValueError, match=f"client 0: refuses step '{step}' of round 5; it is at '{step}'"):
                run.answer(step, 0)
    with pytest.raises(ValueError, match="client 0: refuses step 'other'"):
        run.mode.client(0, run.states[0]).reply({"step": "other", "round": 5})


def test_a_client_refuses_another_round() -> None:
    run = Run(FOUR).all_but("share_keys", "input", "reveal")
    request = {**run.server.requests("share_keys")[0], "round": 6}
    with pytest.raises(ValueError, match="refuses step 'share_keys' of round 6; it is at 'advertise' of round 5"):
        run.mode.client(0, run.states[0]).reply(request)


def test_the_server_goes_through_its_steps_in_order() -> None:
    server = SecureSum().server(range(3), 1, 1.0)
    with pytest.raises(ValueError, match="step 'input' is out of order, 'advertise' is next"):
        server.requests("input")
    with pytest.raises(ValueError, match="no sum before step 'advertise'"):
        server.result()
    server.requests("advertise")
    with pytest.raises(TooFewClients, match=r"0 of 2 needed .* without a reply: \[0, 1, 2\]"):
        server.requests("share_keys")


def test_replies_that_do_not_belong_are_refused() -> None:
    run = Run(FOUR).all_but("input", "reveal")
    run.ask("input", silent=(3,))
    with pytest.raises(ValueError, match="client 0 has replied to step 'input' before"):
        run.server.receive(0, run.replies["input"][0])
    with pytest.raises(ValueError, match="client 9 was not asked in step 'input'; those asked"):
        run.server.receive(9, run.replies["input"][0])
    with pytest.raises(ValueError, match="client 3: its reply to step 'share_keys' of round 5 is not used"):
        run.server.receive(3, run.replies["share_keys"][3])
    reply = run.answer("input", 3)
    with pytest.raises(ValueError, match="client 3: its reply to step 'input' of round 4 is not used"):
        run.server.receive(3, {**reply, "round": 4})
    for wrong in (np.zeros(2, np.uint64), np.zeros(3, np.uint32), np.zeros((1, 3), np.uint64)):
        with pytest.raises(ValueError, match="client 3: needs a masked vector of 3 uint64, got"):
            run.server.receive(3, {**reply, "masked": wrong})
    with pytest.raises(ValueError, match="client 3: the message needs 'masked' of type ndarray, got only"):
        run.server.receive(3, {"step": "input", "round": 5})
    run.server.receive(3, reply)
    run.ask("reveal")
    assert run.server.result().total.tolist() == [-889.0, 1818.0, 12.25]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([0, 1, 1], 3, 1.0, 0), "1 twice"),
        (([0, -1], 3, 1.0, 0), "client must be .* got -1"),
        (([0, 2**63], 3, 1.0, 0), "below 2"),
        (([0, 1], 0, 1.0, 0), "length"),
        (([0, 1], 3, 0.0, 0), "bound must be above 0"),
        (([0, 1], 3, 1.0, -1), "round"),
        (([], 3, 1.0, 0), "at least 2 clients, got 0"),
    ],
)
def test_bad_sums_are_refused(arguments: tuple, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        SecureSum().server(*arguments)


def test_bytes_are_those_of_the_messages() -> None:
    run = Run(FOUR).all_but()
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


def test_the_plain_mode_has_the_same_checks_and_one_step() -> None:
    result = sum_vectors(FOUR, "plain", dropped=[1])
    assert (result.total.tolist(), result.survivors) == ([-899.0, 1798.0, 12.5], (0, 2, 3))
    assert sum_vectors({4: torch.tensor([1.5, 2.0])}).mean.tolist() == [1.5, 2.0]
    with pytest.raises(ValueError, match=r"client 3: value -1000\.0 at position 0 lies outside the bound ±999"):
        sum_vectors(FOUR, bound=999.0)
    with pytest.raises(TooFewClients, match="0 of 1 needed"):
        sum_vectors(FOUR, dropped=list(FOUR))
    with pytest.raises(ValueError, match="client 1 cannot drop out of 'reveal'"):
        sum_vectors(FOUR, dropped={1: "reveal"})
    with pytest.raises(ValueError, match="client 9 cannot drop out"):
        sum_vectors(FOUR, dropped=[9])


def test_unknown_modes_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="mode must be one of plain, secure_sum, ckks, got 'masked'"):
        sum_vectors(FOUR, "masked")
    with pytest.raises(ValueError, match="mode 'plain' does not take these options"):
        sum_vectors(FOUR, "plain", bits=64)


def test_a_longer_vector_and_more_clients() -> None:
    generator = np.random.default_rng(1)
    vectors = {client: generator.integers(-1000, 1000, 70_000) for client in range(0, 24, 2)}
    result = sum_vectors(vectors, "secure_sum", dropped={4: "input", 8: "share_keys", 10: "reveal"}, bits=32)
    assert result.survivors == (0, 2, 6, 10, 12, 14, 16, 18, 20, 22)
    assert np.array_equal(result.total, sum(vectors[client] for client in result.survivors))
    assert isinstance(SecureSum().server(vectors, 1, 1.0), SecureSumServer)
