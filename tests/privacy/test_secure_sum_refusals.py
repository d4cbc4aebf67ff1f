"""What a sum refuses: bad vectors, changed or wrong shares, steps and replies out of order, modes and options."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedclust.privacy.aggregation import TooFewClients
from fedclust.privacy.masking import KEY_BYTES, public_key
from fedclust.privacy.secure_sum import SecureSum
from fedclust.privacy.sums import sum_vectors

FOUR = {0: [1.0, -2.0, 0.5], 1: [10.0, 20.0, -0.25], 2: [100.0, -200.0, 4.0], 3: [-1000.0, 2000.0, 8.0]}


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
def test_bad_vectors_are_refused_and_their_client_drops_out(secure_run: Any, vector: Any, error: str) -> None:
    run = secure_run({**FOUR, 2: vector}, threshold=3).all_but("input", "reveal")
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


def test_changed_shares_are_refused(secure_run: Any) -> None:
    run = secure_run(FOUR, threshold=3).all_but("input", "reveal")
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


def test_another_list_of_keys_for_one_client_is_noticed(secure_run: Any) -> None:
    run = secure_run(FOUR).all_but("share_keys", "input", "reveal")
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
def test_a_list_that_changes_a_clients_own_keys_is_refused(secure_run: Any, swap: str) -> None:
    run = secure_run(FOUR).all_but("share_keys", "input", "reveal")
    run.requests["share_keys"] = run.server.requests("share_keys")
    keys = run.requests["share_keys"][0]["keys"]
    assert isinstance(keys, bytes)
    parts = [keys[64 * at : 64 * at + 64] for at in range(4)]
    parts[0 if swap == "own" else 1] = parts[3]
    run.requests["share_keys"][0]["keys"] = b"".join(parts)
    with pytest.raises(ValueError, match="client 0: the list of public keys changes its own or holds one twice"):
        run.answer("share_keys", 0)


def test_wrong_shares_are_noticed(secure_run: Any) -> None:
    for member, silent in ((2, ()), (1, (1,))):
        run = secure_run(FOUR, threshold=3).all_but("input", "reveal")
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


def test_masks_that_do_not_cancel_give_no_vector(secure_run: Any) -> None:
    run = secure_run(FOUR).all_but("reveal")
    run.server._masked += np.uint64(2**60)
    run.ask("reveal")
    with pytest.raises(ValueError, match="3 of 3 elements of the sum exceed 4 times the bound"):
        run.server.result()


@pytest.mark.parametrize("survivors", [[0, 1], [0, 1, 2, 3, 4], [1, 2, 3], [0, 2, 1], [0, 0, 1, 2], [-1, 0, 1, 2]])
def test_clients_refuse_lists_of_survivors_that_cannot_be(secure_run: Any, survivors: list[int]) -> None:
    run = secure_run(FOUR, threshold=3).all_but("reveal")
    request = {"step": "reveal", "round": 5, "survivors": np.array(survivors)}
    with pytest.raises(ValueError, match="client 0: refuses 'survivors'"):
        run.mode.client(0, run.states[0]).reply(request)


def test_a_client_answers_each_step_once_and_in_order(secure_run: Any) -> None:
    run = secure_run(FOUR)
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


def test_a_client_refuses_another_round(secure_run: Any) -> None:
    run = secure_run(FOUR).all_but("share_keys", "input", "reveal")
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


def test_replies_that_do_not_belong_are_refused(secure_run: Any) -> None:
    run = secure_run(FOUR).all_but("input", "reveal")
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


@pytest.mark.parametrize("value", [0.12, 0.03, -0.7])
@pytest.mark.parametrize("mode", ["plain", "secure_sum"])
def test_lists_lie_within_the_bound_that_is_made_from_them(mode: str, value: float) -> None:
    """In float32 these values are nearer to 0 than they are."""
    assert abs(float(np.float32(value))) < abs(value)
    for vectors in ({0: [value, 0.01], 1: [value, 0.01]}, {0: (value, 0.01), 1: np.array([value, 0.01])}):
        assert sum_vectors(vectors, mode).total == pytest.approx([2 * value, 0.02], abs=1e-12)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.tensor([value, 0.01], dtype=dtype)
        assert sum_vectors({0: tensor, 1: tensor}, mode).total == pytest.approx(
            (2 * tensor.double()).tolist(), abs=1e-12
        )
    with pytest.raises(ValueError, match="client 1: needs a vector of 2 numbers, got shape"):
        sum_vectors({0: [value, 0.01], 1: ["a", "b"]}, mode)


def test_unknown_modes_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="mode must be one of plain, secure_sum, ckks, got 'masked'"):
        sum_vectors(FOUR, "masked")
    with pytest.raises(ValueError, match="mode 'plain' does not take these options"):
        sum_vectors(FOUR, "plain", bits=64)
