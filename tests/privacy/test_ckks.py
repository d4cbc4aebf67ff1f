"""Encrypted sums: accuracy, pieces, parameters, dropouts, and no secret key at the server."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedclust.federation.message import Message, check_message, pack, unpack
from fedclust.privacy.aggregation import TooFewClients

ts = pytest.importorskip("tenseal")

from fedclust.privacy.ckks import CKKSSum  # noqa: E402
from fedclust.privacy.sums import sum_vectors  # noqa: E402

SMALL = {"degree": 4096, "modulus_bits": (54, 55)}
THREE = {5: [1.0, -2.0, 0.5], 2: [10.0, 20.0, -0.25], 9: [-100.0, 200.0, 4.0]}


class Run:
    """A sum step by step, with everything that was said."""

    def __init__(self, vectors: Mapping[int, Any], bound: float, length: int = 3, round: int = 5) -> None:
        self.mode = CKKSSum(**SMALL)  # type: ignore[arg-type]
        self.vectors = vectors
        self.server = self.mode.server(vectors, length, bound, round)
        self.states: dict[int, Message] = {client: {} for client in vectors}
        self.requests: dict[str, dict[int, Message]] = {}
        self.replies: dict[str, dict[int, Message]] = {}

    def ask(self, step: str) -> None:
        self.requests[step], self.replies[step] = self.server.requests(step), {}
        for client in self.requests[step]:
            self.server.receive(client, self.answer(step, client))

    def answer(self, step: str, client: int) -> Message:
        request = unpack(pack(check_message(self.requests[step][client], "server")))
        side = self.mode.client(client, unpack(pack(self.states[client])))
        reply = side.reply(request, self.vectors[client] if step == "input" else None)
        self.states[client] = check_message(side.state, "state")
        self.replies[step][client] = unpack(pack(check_message(reply, f"client {client}")))
        return self.replies[step][client]


def test_the_sum_of_three_is_exact() -> None:
    result = sum_vectors(THREE, "ckks", **SMALL)
    assert result.total.tolist() == [-89.0, 218.0, 4.25]
    assert (result.survivors, result.count) == ((2, 5, 9), 3)
    assert result.mean.tolist() == [-89.0 / 3, 218.0 / 3, 4.25 / 3]


@pytest.mark.slow
def test_a_hundred_sums_of_5120_values() -> None:
    # F11. The vectors are longer than the 4096 slots; one ciphertext for the first 4096 values, one for the rest.
    generator = np.random.default_rng(0)
    vectors = {client: generator.normal(size=5120) for client in range(100)}
    result = sum_vectors(vectors, "ckks", bound=8.0)
    exact = np.sum(list(vectors.values()), axis=0)
    assert result.max_error < 1e-4
    assert np.abs(result.total - exact).max() <= result.max_error
    assert np.abs(result.mean - exact / 100).max() < 1e-6


@pytest.mark.parametrize("length", [1, 2047, 2048, 2049, 5000])
def test_vectors_are_split_into_pieces_of_all_slots(length: int) -> None:
    vectors = {client: np.arange(length) * (client + 1.0) for client in range(2)}
    run = Run(vectors, bound=2.0 * length, length=length)
    run.ask("advertise")
    run.ask("input")
    run.ask("reveal")
    assert run.server.result().total.tolist() == (np.arange(length) * 3.0).tolist()
    pieces = {name for name in run.replies["input"][1] if name.startswith("chunk/")}
    assert len(pieces) == -(-length // 2048)


def test_ciphertexts_are_added_without_changing_a_client_s() -> None:
    run = Run(THREE, bound=256.0)
    run.ask("advertise")
    run.ask("input")
    first = run.replies["input"][2]["chunk/0"]
    secret = ts.context_from(run.states[2]["secret"])
    unit = 1024.0  # sums of three values within ±256 are smaller
    plain = np.array(ts.ckks_vector_from(secret, first).decrypt()) * unit
    assert plain == pytest.approx([10.0, 20.0, -0.25], abs=1e-4)
    summed = run.server.requests("reveal")[2]["chunk/0"]
    plain = np.array(ts.ckks_vector_from(secret, summed).decrypt()) * unit
    assert plain == pytest.approx([-89.0, 218.0, 4.25], abs=1e-4)


def test_the_server_has_no_secret_key_at_any_time() -> None:
    run = Run(THREE, bound=256.0)
    for step in run.mode.steps:
        run.ask(step)
        if step == "reveal":
            continue
        assert run.states[2]["secret"]
        contexts = [run.server._public, *(part.context() for part in run.server._sums)]
        for context in contexts:
            # Even when asked to write the secret key out there is none.
            again = ts.context_from(context.serialize(save_secret_key=True))
            assert not again.has_secret_key()
            assert again.is_public()
        assert not ts.context_from(run.server._context).has_secret_key()
        for part in run.server._sums:
            with pytest.raises(ValueError, match="secret_key"):
                part.decrypt()
    for replies in run.replies.values():
        for reply in replies.values():
            assert "secret" not in reply
    assert ts.context_from(run.requests["input"][5]["context"]).is_public()


def test_only_the_key_holder_makes_keys_and_it_forgets_them() -> None:
    run = Run(THREE, bound=256.0)
    run.ask("advertise")
    assert list(run.requests["advertise"]) == [2]
    assert ts.context_from(run.states[2]["secret"]).has_secret_key()
    assert run.states[5] == run.states[9] == {}
    run.ask("input")
    run.ask("reveal")
    assert list(run.requests["reveal"]) == [2]
    assert run.states[2] == {"stage": "reveal", "round": 5}
    with pytest.raises(ValueError, match="client 2: refuses step 'reveal' of round 5: it holds no key of that round"):
        run.answer("reveal", 2)
    with pytest.raises(ValueError, match="client 5: refuses step 'reveal'"):
        run.mode.client(5).reply(run.requests["reveal"][2])


def test_secret_keys_on_the_way_are_refused_on_both_sides() -> None:
    run = Run(THREE, bound=256.0)
    run.requests["advertise"], run.replies["advertise"] = run.server.requests("advertise"), {}
    reply = run.answer("advertise", 2)
    with pytest.raises(ValueError, match="client 2: sent its secret key; it is not kept"):
        run.server.receive(2, {**reply, "context": run.states[2]["secret"]})
    run.server.receive(2, reply)
    request = run.server.requests("input")[5]
    with pytest.raises(ValueError, match="client 5: was sent a secret key"):
        run.mode.client(5).reply({**request, "context": run.states[2]["secret"]}, THREE[5])


def test_the_released_sum_tells_nothing_about_the_noise() -> None:
    # Values between grid points: the sum is that of the rounded values, to the last bit.
    generator = np.random.default_rng(3)
    vectors = {client: generator.uniform(-1, 1, 100) for client in range(4)}
    result = sum_vectors(vectors, "ckks", bound=1.0, **SMALL)
    step = result.max_error * 2 / 4
    rounded = np.sum([np.rint(vector / step) for vector in vectors.values()], axis=0) * step
    assert result.total.tolist() == rounded.tolist()
    assert 0 < np.abs(result.total - np.sum(list(vectors.values()), axis=0)).max() <= result.max_error


@pytest.mark.parametrize(("degree", "sizes"), [(4096, (54, 55)), (8192, (60, 60))])
def test_the_noise_is_as_large_as_the_grid_assumes(degree: int, sizes: tuple[int, ...]) -> None:
    context = ts.context(ts.SCHEME_TYPE.CKKS, poly_modulus_degree=degree, coeff_mod_bit_sizes=list(sizes), n_threads=1)
    context.global_scale = 2.0**40
    noise = np.array(ts.ckks_vector(context, np.zeros(degree // 2)).decrypt()) * 2.0**40
    # A standard deviation of degree/6 of the scale's units; 2048 values or more give it within a few percent.
    assert 0.75 < noise.std() / (degree / 6) < 1.25


def test_steps_by_hand() -> None:
    # Sums of 100 values up to 1 are below 2**7 = 1 unit, which has 57 bits: 2**50 of the scale's units per 1. Half a
    # step is at least 12 deviations of √100 · 8192/6 of them, so a step is at least 327680 = 2**18.3 of them: 2**19.
    for options in (CKKSSum(), CKKSSum(degree=8192, modulus_bits=(60, 60, 60))):
        assert options.scale_bits == 57
        assert options.unit_and_step(100, 1.0) == (2.0**7, 2.0**-31)
        assert options.unit_and_step(100, 2.0**20) == (2.0**27, 2.0**-11)
        assert options.unit_and_step(100, 2.0**-20) == (2.0**-13, 2.0**-51)


@pytest.mark.parametrize("clients", [2, 3, 10])
@pytest.mark.parametrize("bound", [1e-6, 1e-3, 0.01, 0.12, 0.3, 1.0, 1e3, 1e9])
def test_sums_are_as_precise_for_small_bounds_as_for_large_ones(clients: int, bound: float) -> None:
    vectors = {client: bound * np.array([-1.0, 1.0, 0.3 + 0.01 * client]) for client in range(clients)}
    result = sum_vectors(vectors, "ckks", bound=bound, **SMALL)
    error = np.abs(result.total - np.sum(list(vectors.values()), axis=0)).max()
    assert error <= result.max_error
    assert result.max_error < 1e-6 * bound * clients


def test_bounds_beyond_the_range_of_floats_are_refused() -> None:
    for bound in (1e-300, 1e300):
        with pytest.raises(ValueError, match=r"bound must lie between 2\*\*-900 and 2\*\*900"):
            CKKSSum().server(range(4), 3, bound)


def test_dropouts_and_the_key_holder() -> None:
    result = sum_vectors(THREE, "ckks", dropped=[9], **SMALL)
    assert (result.total.tolist(), result.survivors) == ([11.0, 18.0, 0.25], (2, 5))
    # The key-holder's vector may be missing; its key must not.
    result = sum_vectors({2: [7.0], 5: [1.0], 9: [2.0]}, "ckks", dropped={5: "reveal"}, **SMALL)
    assert result.survivors == (2, 5, 9)
    for step in ("advertise", "reveal"):
        with pytest.raises(TooFewClients, match=f"step '{step}': the key-holder, client 2, did not reply"):
            sum_vectors(THREE, "ckks", dropped={2: step}, **SMALL)
    with pytest.raises(TooFewClients, match="step 'input': 1 of 2 needed"):
        sum_vectors(THREE, "ckks", dropped=[5, 9], **SMALL)
    with pytest.raises(ValueError, match="ckks needs at least 2 clients, got 1"):
        sum_vectors({1: [1.0]}, "ckks", **SMALL)


def test_bad_vectors_and_ciphertexts_are_refused() -> None:
    with pytest.raises(ValueError, match="client 5: 1 of 3 values are NaN"):
        sum_vectors({**THREE, 5: [1.0, float("nan"), 0.0]}, "ckks", **SMALL)
    with pytest.raises(ValueError, match=r"client 9: value 200\.0 at position 1 lies outside the bound ±150"):
        sum_vectors(THREE, "ckks", bound=150.0, **SMALL)
    run = Run(THREE, bound=256.0)
    run.ask("advertise")
    run.requests["input"], run.replies["input"] = run.server.requests("input"), {}
    reply = run.answer("input", 5)
    with pytest.raises(ValueError, match="client 5: what was sent is no ciphertext"):
        run.server.receive(5, {**reply, "chunk/0": b"something else"})
    without = {name: value for name, value in reply.items() if name != "chunk/0"}
    with pytest.raises(ValueError, match=r"client 5: needs ciphertexts of \[3\] values, got \[\]"):
        run.server.receive(5, without)
    shorter = run.mode.client(5).reply({**run.requests["input"][5], "length": 2}, [1.0, 2.0])
    with pytest.raises(ValueError, match=r"client 5: needs ciphertexts of \[3\] values, got \[2\]"):
        run.server.receive(5, shorter)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"degree": 2048}, r"degree must be one of \[4096, 8192, 16384\], got 2048"),
        ({"degree": True}, "degree must be one of"),
        ({"modulus_bits": (60,)}, r"at least two sizes of 20 to 60 bits, together at most 218 .*, got \(60,\)"),
        ({"modulus_bits": (60, 61)}, "20 to 60"),
        ({"modulus_bits": (19, 60)}, "20 to 60"),
        ({"modulus_bits": (60, 60, 60, 60)}, "at most 218"),
        ({"degree": 4096, "modulus_bits": (60, 60)}, "at most 109"),
        ({"modulus_bits": (60.0, 60)}, "modulus_bits must be a whole number"),
    ],
)
def test_parameters_are_checked_at_construction(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        CKKSSum(**options)


def test_a_modulus_too_small_for_the_sum_is_refused_before_any_message() -> None:
    with pytest.raises(ValueError, match=r"need more modulus bits than \(20, 20\): the step would be"):
        CKKSSum(modulus_bits=(20, 20)).server(range(4), 3, 1.0)


def test_without_tenseal_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tenseal")
    load = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "tenseal":
            raise ImportError(name)
        return load(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'fedclust\[he\]'"):
        CKKSSum()
    with pytest.raises(ImportError, match=r"pip install 'fedclust\[he\]'"):
        sum_vectors(THREE, "ckks")
