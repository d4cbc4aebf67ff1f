"""PA-CFL with users that come, go and fail: clusters are the cohort's, numbers are kept within one clustering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from five_users import LR, Recorder, fit, method, own, rows
from sklearn.metrics import adjusted_rand_score

from fedclust.algorithms.pa_cfl import PrivateAdaptiveCFL
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import Natural
from fedclust.federation.backend import InProcess
from fedclust.federation.loop import FederatedLoop
from lightning_modules.pa_cfl import PrivateAdaptiveClient

GROUPS = [[0, 1], [2, 3], [4, 5]]


@pytest.fixture
def run(trainer: Any) -> Callable[..., FederatedLoop]:
    return partial(fit, trainer)


def test_partial_participation_keeps_ids_and_absent_users(run: Any) -> None:
    data = rows([[0, 1], [2, 3], [4, 5]], per_group=3)
    loop = run(method(privacy=False), data, rounds=1, cohort_size=4)
    cohort = loop.cohorts.draw(loop.server.clients, 0, 1)
    clusters = loop.state.clusters.tolist()
    assert all((clusters[user] >= 0) == (user in cohort) for user in range(9))
    assert all(("has_own" in loop.backend.states.get(user)) == (user in cohort) for user in range(9))


@dataclass
class Done:
    """One round: its cohort, and what the state holds and the metrics say after it."""

    cohort: list[int]
    clusters: list[int]
    clustered_in: list[int]
    ari: float


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[Done]:
    """Every round of a run."""
    found: list[Done] = []
    original = PrivateAdaptiveCFL.round

    def round_(self: Any, state: Any, cohort: list[int], server: Any) -> Any:
        new, metrics = original(self, state, cohort, server)
        found.append(Done(cohort, new.clusters.tolist(), new.clustered_in.tolist(), metrics["clients/ari"]))
        return new, metrics

    monkeypatch.setattr(PrivateAdaptiveCFL, "round", round_)
    return found


@pytest.mark.parametrize("every", [1, 1000])
def test_changing_cohorts_are_never_grouped_by_numbers_of_different_rounds(
    run: Any, history: list[Done], every: int
) -> None:
    loop = run(method(privacy=False, recluster_every=every), rows(GROUPS, per_group=4), rounds=6, cohort_size=10)
    assert len({tuple(done.cohort) for done in history}) > 1
    for done in history:
        assert len({done.clustered_in[user] for user in done.cohort}) == 1
    last = history[-1]
    assert len(set(last.clustered_in)) > 1
    assignments = PrivateAdaptiveCFL.assignments(loop.state)
    assert list(assignments) == list(range(12))
    for one, other in combinations(range(12), 2):
        together = (last.clustered_in[one], last.clusters[one]) == (last.clustered_in[other], last.clusters[other])
        assert (assignments[one] == assignments[other]) == together
    newest = max(last.clustered_in)
    assert min(assignments[user] for user in range(12) if last.clustered_in[user] == newest) == 0


def test_numbers_of_clusters_stay_until_the_next_clustering(run: Any, history: list[Done]) -> None:
    """Round 3 lacks the users of group 0; the others keep the numbers that they got in round 1."""
    data = rows(GROUPS, per_group=2)
    backend = _Fails({(3, "describe", 0), (3, "describe", 1)}, on_failure="skip")
    loop = run(method(privacy=False, recluster_every=5, sync_period=None), data, rounds=3, backend=backend)
    first, last = history[0], history[2]
    assert last.ari == 1.0
    assert last.clusters == first.clusters
    assert loop.state.clustered_in.tolist() == [1] * 6


@pytest.mark.parametrize("phase", ["describe", "measure", "protect", "absorb"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_user_that_fails_is_left_out_of_the_rest_of_the_round(run: Any, phase: str, every: int) -> None:
    backend = _Fails({(2, phase, 4)}, on_failure="skip")
    loop = run(method(epsilon=1e6, recluster_every=every), rows(GROUPS, per_group=3), rounds=3, backend=backend)
    assert loop.backend.failures[0].client == 4
    assert loop.latest["clients/failed"] == 0
    assert loop.latest["clusters/pre"] == 3.0
    assert all(torch.isfinite(own(loop, user)).all() for user in range(9))
    assert not any(name in loop.backend.states.get(4) for name in ("gradient", "ranking", "important", "less"))
    # The ledger counts a noisy report that arrived, and no other.
    spent = [int((loop.state.ledger["users"][:, 1] == user).sum()) for user in range(9)]
    assert spent == [3, 3, 3, 3, 3 if phase == "absorb" else 2, 3, 3, 3, 3]


class _Fails(InProcess):
    """Lets clients fail in given (round, action, client)."""

    def __init__(self, where: set[tuple[int, str, int]], **options: Any) -> None:
        super().__init__(**options)
        self.where = where

    def trip(self, client: int, actions: Any, message: Any) -> Any:
        trip = super().trip(client, actions, message)
        if any((self.round, action, client) in self.where for action in actions):
            trip.message = {}
        return trip


def test_a_state_of_another_top_k_is_refused_before_anything_is_asked(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = run(method(privacy=False), rows(GROUPS, per_group=2))
    monkeypatch.setattr(loop.backend, "ask", None)
    with pytest.raises(ValueError, match=r"top_k 0.1 makes sequences of length \d+, but the checkpoint was made with"):
        method(privacy=False, top_k=0.1).round(loop.state, [0, 1], loop.server)


def test_users_with_equal_gradients_are_one_cluster_with_one_model(trainer: Any) -> None:
    """The same four rows each, as one batch."""
    x, y = np.tile(np.eye(6, dtype=np.float32)[:4], (4, 1)), np.tile(np.arange(4), 4)
    data = FederatedDataModule((x, y), Natural(np.repeat(np.arange(4), 4)), seed=0, val_fraction=0.0, test_fraction=0.0)
    recorder = Recorder()
    algorithm = method(privacy=False)
    algorithm.observer = recorder
    loop = FederatedLoop(algorithm, PrivateAdaptiveClient("mlp", lr=LR, batch_size=4))
    trainer(1).fit(loop, datamodule=data)
    assert loop.state.clusters.tolist() == [0] * 4
    assert any(note.startswith("one pre-cluster") and "all clients are equal" in note for note in loop.notes)
    for user in range(1, 4):
        torch.testing.assert_close(own(loop, user), own(loop, 0), rtol=1e-5, atol=1e-6)


def test_three_users_are_told_why_they_are_one_cluster(run: Any) -> None:
    loop = run(method(privacy=False), rows([[0, 1, 2, 3, 4, 5]], per_group=3))
    assert any(note.startswith("one pre-cluster") and "every cluster needs at least 2" in note for note in loop.notes)


def test_partial_participation_has_the_metrics_of_its_cohort(run: Any) -> None:
    loop = run(method(privacy=False), rows(GROUPS, per_group=3), rounds=2, cohort_size=6)
    assert loop.latest["clients/asked"] == 6
    cohort = loop.cohorts.draw(loop.server.clients, 0, 2)
    labels = [loop.state.clusters.tolist()[user] for user in cohort]
    assert loop.latest["clients/ari"] == adjusted_rand_score([user // 3 for user in cohort], labels)
    for name in ("clusters/silhouette", "clusters/delta", "clusters/dbi_final", "seconds/train", "bytes/ms_sent"):
        assert name in loop.latest
