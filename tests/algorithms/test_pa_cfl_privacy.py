"""What leaves a PA-CFL user, in which form, and what the outputs say of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from five_users import Recorder, fit, method, rows
from torch import Tensor

from fedclust.federation.loop import FederatedLoop
from fedclust.federation.message import Message, message_bytes
from fedclust.privacy.importance import split_important
from lightning_modules.pa_cfl import PrivateAdaptiveClient


@pytest.fixture
def run(trainer: Any) -> Callable[..., FederatedLoop]:
    return partial(fit, trainer)


def test_each_server_sees_its_own_part_only(run: Any) -> None:
    """The spec's table: values of important coordinates only at the AS, the order of coordinates only at the MS."""
    recorder = Recorder()
    algorithm = method(epsilon=10.0)
    algorithm.observer = recorder
    loop = run(algorithm, rows([[0, 1], [2, 3]], per_group=3), rounds=2)
    allowed = {
        ("ms", "client"): {"sequence", "n_rows", "norm", "less"},
        ("as", "client"): {"important", "n_rows"},
        ("as", "ms"): {"clients", "groups", *(f"less/{user}" for user in range(6))},
        ("client", "ms"): {"ranking", "private", "bound", "epsilon", "noise"},
        ("client", "as"): {"aggregate"},
    }
    assert {(to.split()[0], sender.split()[0]) for to, sender, _ in recorder.seen} == allowed.keys()
    for receiver, sender, message in recorder.seen:
        assert message.keys() <= allowed[receiver.split()[0], sender.split()[0]], (receiver, sender)
    sequences = [torch.as_tensor(value) for value in recorder.of("ms", "sequence").values()]
    k = len(sequences[0])
    less = [torch.as_tensor(value) for value in recorder.of("ms", "less").values()]
    d = sum(value.numel() for value in loop.state.initial.values())
    assert all(len(values) == d - k for values in less)
    for end in ("ms", "as"):
        received = sum(message_bytes(message) for to, _, message in recorder.seen if to == end)
        sent = sum(message_bytes(message) for _, sender, message in recorder.seen if sender == end)
        assert (loop.latest[f"bytes/{end}_received"] * 2, loop.latest[f"bytes/{end}_sent"] * 2) == (received, sent)


@pytest.mark.parametrize("privacy", [True, False])
def test_important_values_and_the_rest_are_those_of_the_gradient(
    run: Any, monkeypatch: pytest.MonkeyPatch, privacy: bool
) -> None:
    """With the noise taken away, the two parts are exactly what π^g makes of the whole gradient."""
    monkeypatch.setattr("lightning_modules.pa_cfl.randomise", lambda less, *_, **__: less)
    recorder = Recorder()
    algorithm = method(privacy=privacy)
    algorithm.similarity = "l2"  # reveals whole gradients to the management server, so it is refused with privacy
    algorithm.observer = recorder
    run(algorithm, rows([[0, 1], [2, 3]], per_group=2))
    gradients, rankings = recorder.of("ms", "gradient"), recorder.to_users("ranking")
    assert len(gradients) == 4
    for user, gradient in gradients.items():
        important, less = split_important(gradient, rankings[user])
        assert torch.equal(recorder.of("as", "important")[user], important)
        assert torch.equal(recorder.of("ms" if privacy else "as", "less")[user], less)


def test_the_rest_is_clipped_to_the_median_norm_and_gets_noise_of_its_own(run: Any, monkeypatch: Any) -> None:
    """Sec. 5.5 and 7.4: Φ is the median of the norms, the noise has mean absolute value b = 2Φ/ε₀ (F4, F6)."""
    vectors: dict[tuple[int, int], Tensor] = {}
    original = PrivateAdaptiveClient.measure

    @wraps(original)
    def measure(self: Any, message: Message, ctx: Any) -> Message:
        reply = original(self, message, ctx)
        vectors[ctx.round, ctx.id] = torch.as_tensor(ctx.vault["less"]).clone()
        return reply

    monkeypatch.setattr(PrivateAdaptiveClient, "measure", measure)
    recorder = Recorder()
    algorithm = method(epsilon=0.5)
    algorithm.observer = recorder
    run(algorithm, rows([[0, 1], [2, 3]], per_group=3))
    norms = {user: float(vectors[1, user].norm()) for user in range(6)}
    bound = float(np.median(list(norms.values())))
    assert min(norms.values()) < bound < max(norms.values())
    told = recorder.to_users("bound")
    assert list(told.values()) == pytest.approx([bound] * 6, rel=1e-6)
    noise = []
    for user in range(6):
        clipped = vectors[1, user] * min(1.0, bound / norms[user])
        noise.append(torch.as_tensor(recorder.of("ms", "less")[f"client {user}"]) - clipped)
        scale = 2 * bound / 0.5
        # 1,388 draws: the mean of |noise| has a standard error of 2.7 %.
        assert float(noise[-1].abs().mean()) == pytest.approx(scale, rel=0.12)
        assert abs(float(noise[-1].mean())) < 0.2 * scale
    apart = torch.corrcoef(torch.stack(noise)).fill_diagonal_(0)
    assert float(apart.abs().max()) < 0.15


def test_nobodys_noise_repeats_in_another_round(run: Any) -> None:
    recorder = Recorder()
    algorithm = method(epsilon=1e-6)  # nothing but noise
    algorithm.observer = recorder
    run(algorithm, rows([[0, 1], [2, 3]], per_group=2), rounds=2)
    sent = [torch.as_tensor(message["less"]) for to, _, message in recorder.seen if to == "ms" and "less" in message]
    units = torch.stack([values / values.norm() for values in sent])
    assert len(units) == 8
    assert float((units @ units.T).fill_diagonal_(0).abs().max()) < 0.15


def test_replies_hold_nothing_beside_what_is_documented(run: Any, asked: Any) -> None:
    run(method(epsilon=10.0), rows([[0, 1], [2, 3]], per_group=2))
    found = {name: set().union(*(reply.keys() for reply in replies.values())) for (name,), _, replies in asked}
    assert found == {
        "describe": {"ms/sequence", "ms/n_rows", "term/loss"},
        "measure": {"ms/norm"},
        "protect": {"as/important", "as/n_rows", "ms/less"},
        "absorb": set(),
        "evaluate_own": {"n", "confusion", "auc"},
    }


def test_what_the_aggregation_server_gets_is_shuffled_inside_groups(run: Any) -> None:
    recorder = Recorder()
    algorithm = method(epsilon=10.0)
    algorithm.observer = recorder
    loop = run(algorithm, rows([[0, 1], [2, 3]], per_group=3))
    sent = {int(name.split()[1]): torch.as_tensor(value) for name, value in recorder.of("ms", "less").items()}
    got = next(message for to, sender, message in recorder.seen if (to, sender) == ("as", "ms"))
    groups = loop.state.pre_clusters.tolist()
    for group in set(groups):
        members = [user for user in range(6) if groups[user] == group]
        before = torch.stack([sent[user] for user in members])
        after = torch.stack([torch.as_tensor(got[f"less/{user}"]) for user in members])
        assert torch.equal(before.sort(0).values, after.sort(0).values)
        assert not torch.equal(before, after)


def test_the_ledger_grows_with_the_rounds(run: Any) -> None:
    loop = run(method(epsilon=1.0), rows([[0, 1], [2, 3]], per_group=3), rounds=3)
    assert loop.latest["privacy/epsilon_round"] < loop.latest["privacy/epsilon_total"]
    assert loop.latest["privacy/epsilon_round"] == pytest.approx(4.73, abs=0.01)
    assert len(loop.state.ledger["rounds"]) == 3


def test_outputs_say_what_is_covered_and_how_large_the_noise_is(run: Any) -> None:
    """k = 2 % of the d parameters and ε₀ = 1: the noise has about 2·√(2·d₂) times the norm Φ."""
    loop = run(method(epsilon=1.0), rows([[0, 1], [2, 3]], per_group=2))
    d = sum(value.numel() for value in loop.state.initial.values())
    ratio = 2 * (2 * (d - int(0.02 * d))) ** 0.5
    assert any("carry no differential privacy" in note for note in loop.notes)
    assert any("the bound 'zcdp_tight'" in note and "management server included" in note for note in loop.notes)
    assert any("noise='simulated'" in note and "protects nobody" in note for note in loop.notes)
    secure = run(method(epsilon=1.0, noise="secure"), rows([[0, 1], [2, 3]], per_group=2))
    assert not any("simulated" in note for note in secure.notes)
    assert any(f"about {ratio:.3g} times" in note for note in loop.notes)
    assert not run(method(privacy=False), rows([[0, 1], [2, 3]], per_group=2)).notes
