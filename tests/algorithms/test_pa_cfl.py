"""PA-CFL round by round: what each server sees, and the numbers against an independent computation."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

import fedclust
from fedclust.algorithms.pa_cfl import PrivateAdaptiveCFL
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import LabelGroups
from fedclust.federation.loop import FederatedLoop
from fedclust.federation.message import Message, message_bytes
from fedclust.privacy.importance import global_ranking, join_important, split_important
from lightning_modules.pa_cfl import PrivateAdaptiveClient

LR = 0.1


def rows(groups: list[list[int]], per_group: int, n_features: int = 6) -> FederatedDataModule:
    rng = np.random.default_rng(0)
    y = np.arange(360) % 6
    x = (np.eye(6)[y][:, :n_features] * 0.8 + rng.normal(0.1, 0.03, (360, n_features))).astype(np.float32)
    held = np.isin(y, [label for group in groups for label in group])
    x, y = x[held], y[held]
    return FederatedDataModule((x, y), LabelGroups(groups, clients_per_group=per_group), seed=0)


def method(**changes: Any) -> PrivateAdaptiveCFL:
    settings: dict[str, Any] = {
        "round_epochs": 1,
        "top_k": 0.02,
        "similarity": "index_overlap",
        "noise": "simulated",
        "sync_period": None,
    }
    return PrivateAdaptiveCFL(**{**settings, **changes})


@pytest.fixture
def run(trainer: Any) -> Callable[..., FederatedLoop]:
    def start(
        algorithm: PrivateAdaptiveCFL, data: FederatedDataModule, rounds: int = 1, **options: Any
    ) -> FederatedLoop:  # fmt: skip
        loop = FederatedLoop(algorithm, PrivateAdaptiveClient("mlp", lr=LR, batch_size=16), **options)
        trainer(rounds).fit(loop, datamodule=data)
        return loop

    return start


def own(loop: FederatedLoop, user: int) -> Tensor:
    """A user's own model as one vector, in the order of the parameters."""
    state = loop.backend.states.get(user)
    names = [name for name, _ in loop.client.named_parameters()]
    return torch.cat([torch.as_tensor(state[f"own/{name}"]).flatten() for name in names])


class Recorder:
    """Keeps every message that reached a server."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Message]] = []

    def __call__(self, receiver: str, sender: str, message: Message) -> None:
        self.seen.append((receiver, sender, message))

    def of(self, receiver: str, name: str) -> dict[str, Any]:
        return {sender: message[name] for to, sender, message in self.seen if to == receiver and name in message}


def test_a_round_without_noise_equals_the_formulas(run: Any) -> None:
    recorder = Recorder()
    algorithm = method(privacy=False)
    algorithm.observer = recorder
    data = rows([[0, 1], [2, 3], [4, 5]], per_group=2)
    loop = run(algorithm, data)
    sequences = [torch.as_tensor(value) for value in recorder.of("ms", "sequence").values()]
    ranking = global_ranking(sequences, len(sequences[0]))
    important, less = recorder.of("as", "important"), recorder.of("as", "less")
    initial = torch.cat([torch.as_tensor(value).flatten() for value in loop.state.initial.values()])
    d = len(initial)
    gradients = {
        user: join_important(important[f"client {user}"], less[f"client {user}"], ranking, d) for user in range(6)
    }
    labels = loop.state.clusters.tolist()
    sizes = torch.tensor(data.n_rows, dtype=torch.float32)
    for user in range(6):
        members = [other for other in range(6) if labels[other] == labels[user]]
        stacked = torch.stack([gradients[other] for other in members])
        weights = sizes[members] / sizes[members].sum()
        center = weights @ stacked
        cosine = torch.nn.functional.cosine_similarity(stacked, center[None])
        step = torch.softmax(cosine, 0) @ stacked
        torch.testing.assert_close(own(loop, user), initial - LR * step, rtol=1e-4, atol=1e-6)


def test_planted_groups_are_found(run: Any) -> None:
    loop = run(method(privacy=False), rows([[0, 1], [2, 3], [4, 5]], per_group=3), rounds=2)
    assert loop.latest["clients/ari"] == 1.0
    assert loop.latest["clusters/pre"] == 3.0
    assert loop.latest["clusters/final"] == 3.0


def test_each_server_sees_its_own_part_only(run: Any) -> None:
    """The spec's table: values of important coordinates only at the AS, the order of coordinates only at the MS."""
    recorder = Recorder()
    algorithm = method(epsilon=10.0)
    algorithm.observer = recorder
    loop = run(algorithm, rows([[0, 1], [2, 3]], per_group=3), rounds=2)
    assert {to for to, _, _ in recorder.seen} == {"ms", "as"}
    allowed = {
        ("ms", "client"): {"sequence", "n_rows", "norm", "less"},
        ("as", "client"): {"important", "n_rows"},
        ("as", "ms"): {"clients", "groups", *(f"less/{user}" for user in range(6))},
    }
    for receiver, sender, message in recorder.seen:
        kind = "ms" if sender == "ms" else "client"
        assert message.keys() <= allowed[receiver, kind], (receiver, sender)
    sequences = [torch.as_tensor(value) for value in recorder.of("ms", "sequence").values()]
    k = len(sequences[0])
    less = [torch.as_tensor(value) for value in recorder.of("ms", "less").values()]
    d = sum(value.numel() for value in loop.state.initial.values())
    assert all(len(values) == d - k for values in less)
    total = sum(message_bytes(message) for to, _, message in recorder.seen if to == "as")
    assert loop.latest["bytes/as_received"] * 2 == total


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


@pytest.mark.parametrize("users", [1, 2, 3])
def test_few_users_stay_one_cluster(run: Any, users: int) -> None:
    data = rows([[0, 1, 2, 3, 4, 5]], per_group=users)
    loop = run(method(), data)
    assert loop.state.clusters.tolist() == [0] * users
    assert loop.latest["clusters/final"] == 1.0


def test_a_user_that_does_not_move(run: Any, monkeypatch: Any) -> None:
    original = PrivateAdaptiveClient.learn

    def learn(self: Any, ctx: Any, epochs: int) -> Any:
        before = self.snapshot()
        fit = original(self, ctx, epochs)
        if ctx.id == 1:
            self.load_exchanged(before)
        return fit

    monkeypatch.setattr(PrivateAdaptiveClient, "learn", learn)
    for privacy in (True, False):
        loop = run(method(privacy=privacy), rows([[0, 1], [2, 3]], per_group=2))
        assert all(torch.isfinite(own(loop, user)).all() for user in range(4))


def test_partial_participation_keeps_ids_and_absent_users(run: Any) -> None:
    data = rows([[0, 1], [2, 3], [4, 5]], per_group=3)
    loop = run(method(privacy=False), data, rounds=1, cohort_size=4)
    cohort = loop.cohorts.draw(loop.server.clients, 0, 1)
    clusters = loop.state.clusters.tolist()
    assert all((clusters[user] >= 0) == (user in cohort) for user in range(9))
    assert all(("has_own" in loop.backend.states.get(user)) == (user in cohort) for user in range(9))


def test_the_global_step_reaches_everyone_and_has_the_papers_size(run: Any) -> None:
    data = rows([[0, 1], [2, 3], [4, 5]], per_group=2)
    loop = run(method(privacy=False, sync_period=1), data)
    initial = torch.cat([torch.as_tensor(value).flatten() for value in loop.state.initial.values()])
    moves = torch.stack([own(loop, user) - initial for user in range(6)])
    assert torch.equal(moves, moves[:1].expand_as(moves))
    assert float(moves[0].norm()) <= LR * (1 + 1e-5)
    mean = run(method(privacy=False, sync_period=1, global_step="mean_norm"), data)
    assert float((own(mean, 0) - initial).norm()) != pytest.approx(float(moves[0].norm()))


def test_the_ledger_grows_and_survives_a_checkpoint(run: Any) -> None:
    loop = run(method(epsilon=1.0), rows([[0, 1], [2, 3]], per_group=3), rounds=3)
    assert loop.latest["privacy/epsilon_round"] < loop.latest["privacy/epsilon_total"]
    assert loop.latest["privacy/epsilon_round"] == pytest.approx(4.73, abs=0.01)
    assert len(loop.state.ledger["rounds"]) == 3


@pytest.mark.parametrize("similarity", ["dtw", "fastdtw", "rank_overlap", "l2", "cosine"])
def test_every_similarity_runs(run: Any, similarity: str) -> None:
    loop = run(method(privacy=False, similarity=similarity), rows([[0, 1], [2, 3]], per_group=2))
    assert 0 <= loop.latest["val/acc_mean"] <= 1


def test_modules_can_be_switched_off(run: Any) -> None:
    data = rows([[0, 1], [2, 3]], per_group=3)
    plain = run(method(privacy=False, fine_clustering=False), data)
    assert plain.state.clusters.tolist() == plain.state.pre_clusters.tolist()
    without = run(method(privacy=False, pre_clustering=False), data)
    assert without.latest["clusters/pre"] == 1.0
    assert without.latest["clients/ari"] == 1.0


@pytest.mark.parametrize("similarity", ["dtw", "rank_overlap", "l2"])
def test_a_new_client_joins_the_group_whose_classes_it_has(similarity: str) -> None:
    groups = [[0, 1], [2, 3], [4, 5]]
    result = fedclust.federate(
        method(privacy=False, similarity="index_overlap"), PrivateAdaptiveClient("mlp", lr=LR, batch_size=16),
        rows(groups, per_group=3), rounds=2, progress=False,
    )  # fmt: skip
    assert adjusted_rand_score(np.repeat(range(3), 3), list(result.assignments.values())) == 1
    result.state.similarity = similarity
    x = np.repeat(np.eye(6), 10, axis=0) * 0.8 + 0.1
    y = np.repeat(np.arange(6), 10)
    found = [result.assign((x[np.isin(y, group)], y[np.isin(y, group)])) for group in groups]
    if similarity == "dtw":  # knows no sets: only that it gives one of the clusters is certain
        assert set(found) <= set(result.assignments.values())
    else:
        assert found == [result.assignments[3 * number] for number in range(3)]
    with pytest.raises(ValueError, match="needs labels"):
        result.assign(x)


def test_nobody_can_be_assigned_before_the_first_round(run: Any) -> None:
    data = rows([[0, 1], [2, 3]], per_group=2)
    state = run(method(privacy=False), data).state
    state.clusters.fill_(-1)
    with pytest.raises(ValueError, match="at least one round"):
        PrivateAdaptiveCFL.assign_client(state, PrivateAdaptiveClient("mlp"), None)


def test_outputs_say_what_is_covered_and_how_large_the_noise_is(run: Any) -> None:
    """k = 2 % of the d parameters and ε₀ = 1: the noise has about 2·√(2·d₂) times the norm Φ."""
    loop = run(method(epsilon=1.0), rows([[0, 1], [2, 3]], per_group=2))
    d = sum(value.numel() for value in loop.state.initial.values())
    ratio = 2 * (2 * (d - int(0.02 * d))) ** 0.5
    assert any("carry no differential privacy" in note for note in loop.notes)
    assert any(f"about {ratio:.3g} times" in note for note in loop.notes)
    assert not run(method(privacy=False), rows([[0, 1], [2, 3]], per_group=2)).notes


def test_clients_and_summary_tell_clusters_groups_and_all_rounds_privacy(tmp_path: Any) -> None:
    result = fedclust.federate(
        method(epsilon=100.0), PrivateAdaptiveClient("mlp", lr=LR, batch_size=16), rows([[0, 1], [2, 3]], per_group=2),
        rounds=3, progress=False, directory=tmp_path / "run",
    )  # fmt: skip
    with (tmp_path / "run" / "clients.csv").open(newline="") as file:
        clients = list(csv.DictReader(file))
    assert [row["group"] for row in clients] == ["0", "0", "1", "1"]
    assert all(row["cluster"] for row in clients)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["privacy/epsilon_total"] == result.history[-1]["privacy/epsilon_total"]
    assert "clients/ari" in summary["metrics"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 2.0}, "top_k"),
        ({"epsilon": -1}, "epsilon"),
        ({"similarity": "dwt"}, "similarity"),
        ({"sync_period": 0}, "sync_period"),
        ({"global_step": "big"}, "global_step"),
        ({"delta": 1.0}, "delta"),
        ({"noise": "none"}, "noise"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        method(**changes)


def test_split_and_join_are_inverse_on_a_real_gradient(run: Any) -> None:
    vector = torch.randn(50, generator=torch.Generator().manual_seed(0))
    ranking = torch.tensor([7, 3, 41])
    important, less = split_important(vector, ranking)
    assert torch.equal(join_important(important, less, ranking, 50), vector)
