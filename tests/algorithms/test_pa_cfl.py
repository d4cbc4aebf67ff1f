"""PA-CFL round by round: what each server sees, and the numbers against an independent computation."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from five_users import LR, Recorder, fit, method, own, rows
from sklearn.metrics import adjusted_rand_score

import fedclust
from fedclust.algorithms.pa_cfl import PrivateAdaptiveCFL, Similarity
from fedclust.clustering.distances import GRADIENT_METRICS, SEQUENCE_METRICS
from fedclust.federation.loop import FederatedLoop
from fedclust.privacy.importance import global_ranking, join_important
from lightning_modules.pa_cfl import PrivateAdaptiveClient


@pytest.fixture
def run(trainer: Any) -> Callable[..., FederatedLoop]:
    return partial(fit, trainer)


def test_a_round_without_noise_equals_the_formulas(run: Any) -> None:
    recorder = Recorder()
    algorithm = method(privacy=False)
    algorithm.observer = recorder
    data = rows([[0, 1], [2, 3]], per_group=4)
    loop = run(algorithm, data)
    sequences = [torch.as_tensor(value) for value in recorder.of("ms", "sequence").values()]
    ranking = global_ranking(sequences, len(sequences[0]))
    important, less = recorder.of("as", "important"), recorder.of("as", "less")
    initial = torch.cat([torch.as_tensor(value).flatten() for value in loop.state.initial.values()])
    d = len(initial)
    gradients = {
        user: join_important(important[f"client {user}"], less[f"client {user}"], ranking, d) for user in range(8)
    }
    labels = loop.state.clusters.tolist()
    sizes = torch.tensor(data.n_rows, dtype=torch.float32)
    for user in range(8):
        members = [other for other in range(8) if labels[other] == labels[user]]
        assert len(members) == 4
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
        recorder = Recorder()
        algorithm = method(privacy=privacy)
        algorithm.observer = recorder
        loop = run(algorithm, rows([[0, 1], [2, 3]], per_group=2))
        assert all(torch.isfinite(own(loop, user)).all() for user in range(4))
        assert not recorder.of("as", "important")["client 1"].any()
        less = recorder.of("ms" if privacy else "as", "less")["client 1"]
        assert bool(less.any()) == privacy  # nothing but noise


def test_where_nobody_moves_the_global_step_moves_nobody(run: Any, monkeypatch: Any) -> None:
    """All norms are 0, so Φ is 2⁻¹⁰⁰: a unit vector of that noise would move every model by η."""
    monkeypatch.setattr(PrivateAdaptiveClient, "learn", _learns_nothing)
    for kind in ("unit", "mean_norm"):
        loop = run(method(sync_period=1, global_step=kind), rows([[0, 1], [2, 3]], per_group=2))
        initial = torch.cat([torch.as_tensor(value).flatten() for value in loop.state.initial.values()])
        assert all(float((own(loop, user) - initial).norm()) < 1e-20 for user in range(4))


def _learns_nothing(self: Any, ctx: Any, epochs: int) -> Any:
    return SimpleNamespace(terms={"loss": 0.0})


@pytest.mark.parametrize("kind", ["unit", "mean_norm"])
def test_the_global_step_reaches_everyone_in_its_rounds_only(run: Any, kind: str) -> None:
    """G is the mean over users of their aggregates' unit vectors (Sec. 5.7), taken here from the round without it."""
    data = rows([[0, 1, 2], [0, 1, 2], [3, 4, 5]], per_group=2)  # a cluster of four users and one of two
    recorder = Recorder()
    algorithm = method(privacy=False)
    algorithm.observer = recorder
    plain = run(algorithm, data)
    assert plain.latest["clusters/synchronised"] == 0
    aggregates = torch.stack(list(recorder.to_users("aggregate").values()))
    assert sorted(torch.bincount(plain.state.clusters).tolist()) == [2, 4]
    step = (aggregates / aggregates.norm(dim=1, keepdim=True)).mean(0)
    if kind == "mean_norm":
        step = step / step.norm() * aggregates.unique(dim=0).norm(dim=1).mean()
    recorder.seen.clear()
    algorithm = method(privacy=False, sync_period=1, global_step=kind)
    algorithm.observer = recorder
    loop = run(algorithm, data)
    assert loop.latest["clusters/synchronised"] == 1
    for got in recorder.to_users("aggregate").values():
        torch.testing.assert_close(got, step, rtol=1e-4, atol=1e-6)
    models = torch.stack([own(loop, user) for user in range(6)])
    assert torch.equal(models, models[:1].expand_as(models))
    every_second = run(method(privacy=False, sync_period=2, global_step=kind), data, rounds=3)
    assert every_second.latest["clusters/synchronised"] == 0


@pytest.mark.parametrize("similarity", [*SEQUENCE_METRICS, *GRADIENT_METRICS])
def test_every_similarity_clusters(run: Any, similarity: str) -> None:
    loop = run(method(privacy=False, similarity=similarity), rows([[0, 1], [2, 3]], per_group=3))
    assert 1 <= loop.latest["clusters/pre"] <= 3
    if similarity not in ("dtw", "fastdtw"):  # which compare the numbers of coordinates, not which ones they are
        assert loop.latest["clusters/pre"] == 2
        assert loop.latest["clients/ari"] == 1.0
        assert loop.latest["clusters/silhouette"] > 0
        assert loop.latest["clusters/delta"] > 0


def test_the_literal_of_the_signature_lists_every_similarity() -> None:
    assert set(get_args(Similarity)) == {*SEQUENCE_METRICS, *GRADIENT_METRICS}


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
    state.clustered_in.fill_(-1)
    with pytest.raises(ValueError, match="at least one round"):
        PrivateAdaptiveCFL.assign_client(state, PrivateAdaptiveClient("mlp"), None)


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
        ({"radius": 0}, "radius"),
        ({"delta": 1e-320}, "delta must be at least"),
        ({"similarity": "l2", "privacy": True}, "sends whole gradients"),
        ({"epsilon": 1e10}, r"2\*\*30"),
        ({"epsilon": 1e-300}, "scale of the noise"),
        ({"privacy": "false"}, "privacy must be true or false"),
        ({"pre_clustering": 0}, "pre_clustering must be true or false"),
        ({"fine_clustering": None}, "fine_clustering must be true or false"),
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
