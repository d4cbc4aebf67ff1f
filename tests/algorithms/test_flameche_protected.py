"""FLAMECHE with sums that the server may not read: what it gets, what follows from it, who drops out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from rotated import by_class_shares, fit, planted

import fedclust
from fedclust.algorithms.flameche import FLAMECHE
from fedclust.clustering.mixtures import Spherical
from fedclust.data.transforms import Rotations
from fedclust.federation.backend import Backend, InProcess
from fedclust.federation.loop import FederatedLoop
from lightning_modules.flameche import FLAMECHEClient


@pytest.fixture
def run(trainer: Any) -> Callable[..., FederatedLoop]:
    return partial(fit, trainer)


def statistics(loop: FederatedLoop, context: Any) -> torch.Tensor:
    """(N, C, s), computed anew: the clients keep theirs for themselves."""
    tables = [loop.backend.data.client(client).train for client in range(loop.backend.data.n_clients)]
    found = [loop.client.metadata(context(table, seed=loop.resolved_seed)) for table in tables]
    return torch.stack([Spherical().statistics(one) for one in found])


@pytest.mark.parametrize("mixture", ["spherical", "gaussian", "multinomial"])
@pytest.mark.parametrize(("mode", "error"), [("secure_sum", 1e-9), ("ckks", 1e-3)])
def test_protected_sums_give_the_same_groups(run: Any, mode: str, error: float, mixture: str) -> None:
    if mode == "ckks":
        pytest.importorskip("tenseal")
    settings = {"n_clusters": 2, "n_init": 1, "mixture": mixture, "recluster_every": None}
    data = by_class_shares() if mixture == "multinomial" else planted()
    plain = run(FLAMECHE(**settings), rounds=3, data=data).state
    protected = run(FLAMECHE(**settings, aggregation=mode), rounds=3, folder=mode, data=data).state
    assert torch.equal(protected.slots, plain.slots)
    assert (protected.slots >= 0).all()
    assert torch.allclose(protected.parameters, plain.parameters, atol=error)
    assert not protected.statistics.numel()


def test_what_the_server_gets_in_a_secure_sum_is_masked(run: Any, monkeypatch: Any) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    original = Backend._accept

    def accept(self: Any, outcome: Any) -> Any:
        seen.extend((name, dict(reply)) for name, reply in outcome.replies.items())
        return original(self, outcome)

    monkeypatch.setattr(Backend, "_accept", accept)
    loop = run(FLAMECHE(2, aggregation="secure_sum", recluster_every=None), rounds=2)
    allowed = {
        "describe_metadata": {"shape"},
        "locate": {"slots", "errors"},
        "contribute": {"step", "round", "keys", "letters", "commitment", "masked", "shares"},
    }
    for name, reply in seen:
        assert name not in allowed or reply.keys() <= allowed[name], name
    masked = [reply["masked"] for name, reply in seen if name == "contribute" and "masked" in reply]
    assert len(masked) == 8  # in the second round nobody moves, and there is no sum
    for vector in masked:  # most of a plain change is 0; of a masked one nothing is
        assert (np.asarray(vector) == 0).mean() < 0.01
    assert not any(loop.backend.states.get(client) for client in range(8))  # no key, no mask, no metadata


def failing(monkeypatch: Any, action: str, when: Callable[[Any, Any], bool]) -> None:
    """Clients fail in that action when `when(message, ctx)` says so."""
    original = getattr(FLAMECHEClient, action)

    @functools.wraps(original)
    def fails(self: Any, message: Any, ctx: Any) -> Any:
        if when(message, ctx):
            raise OSError("gone")
        return original(self, message, ctx)

    monkeypatch.setattr(FLAMECHEClient, action, fails)


SKIP = {"on_failure": "skip"}
PROTECTED = {"n_clusters": 2, "recluster_every": None, "aggregation": "secure_sum"}


def test_a_client_that_drops_out_of_a_sum_keeps_its_slot(run: Any, context: Any, monkeypatch: Any) -> None:
    failing(monkeypatch, "contribute", lambda message, ctx: ctx.id == 3 and message["step"] == "input")
    loop = run(FLAMECHE(**PROTECTED), rounds=2, backend=InProcess(**SKIP))
    assert loop.state.slots[0, 3] == -1
    assert (loop.state.slots[0, [0, 1, 2, 4, 5, 6, 7]] >= 0).all()
    expected = Spherical().sums(statistics(loop, context), loop.state.slots, 2)
    assert torch.allclose(loop.state.sums, expected, atol=1e-6)


def test_who_is_in_no_cluster_trains_no_cluster(run: Any, monkeypatch: Any) -> None:
    asked: list[int] = []
    failing(monkeypatch, "contribute", lambda message, ctx: ctx.id == 3 and message["step"] == "input")
    failing(monkeypatch, "update", lambda message, ctx: bool(asked.append(ctx.id)))
    loop = run(FLAMECHE(**PROTECTED), backend=InProcess(**SKIP))
    assert sorted(asked) == [0, 1, 2, 4, 5, 6, 7]
    assert FLAMECHE.assignments(loop.state).keys() == {0, 1, 2, 4, 5, 6, 7}


@pytest.mark.parametrize("mode", ["secure_sum", "ckks"])
def test_a_refused_sum_leaves_everything_as_it_was(run: Any, monkeypatch: Any, mode: str) -> None:
    """Nobody replies: in the masked sum too few, in the encrypted one not even who holds the key."""
    if mode == "ckks":
        pytest.importorskip("tenseal")
    failing(monkeypatch, "contribute", lambda message, ctx: True)
    loop = run(FLAMECHE(**{**PROTECTED, "aggregation": mode}), backend=InProcess(**SKIP))
    assert (loop.state.slots == -1).all()
    assert not any(np.isnan(value) for value in loop.latest.values())
    assert all(torch.equal(value[0], loop.state.initial[name]) for name, value in loop.state.models.items())
    assert any("assignments stay as they were" in note for note in loop.notes)


@pytest.mark.parametrize("mixture", ["gaussian", "multinomial"])
def test_first_centroids_that_cannot_be_summed_wait_for_a_round_that_can(
    run: Any, monkeypatch: Any, mixture: str
) -> None:
    failing(monkeypatch, "contribute", lambda message, ctx: ctx.round == 1)
    settings = {**PROTECTED, "mixture": mixture}
    first = run(FLAMECHE(**settings), backend=InProcess(**SKIP))
    assert not first.state.parameters.numel()
    assert any("nobody is grouped yet" in note for note in first.notes)
    second = run(FLAMECHE(**settings), rounds=2, folder="two", backend=InProcess(**SKIP))
    assert (second.state.slots >= 0).all()


def test_one_newcomer_that_fails_does_not_end_the_run(run: Any, monkeypatch: Any) -> None:
    failing(monkeypatch, "describe_metadata", lambda message, ctx: ctx.id == 5)
    loop = run(FLAMECHE(2), rounds=2, backend=InProcess(**SKIP))
    assert loop.state.clusters[5] == -1
    assert (loop.state.clusters[[0, 1, 2, 3, 4, 6, 7]] >= 0).all()
    assert any("client 5 failed in 'describe_metadata'" in note for note in loop.notes)


def test_protected_sums_of_one_client_a_round_are_refused_before_training(run: Any) -> None:
    for options, text in (({"cohort_size": 1}, "1 of 8"), ({"participation": 0.1}, "1 of 8")):
        with pytest.raises(ValueError, match=rf"at least 2 clients in a round.*{text}"):
            run(FLAMECHE(2, aggregation="secure_sum"), **options)
    with pytest.raises(ValueError, match="there is 1: use aggregation: plain"):
        run(FLAMECHE(1, aggregation="secure_sum"), data=planted(1))


class Told(pl.Callback):
    """What the server knows after every round: who is counted where, and the sums."""

    def __init__(self) -> None:
        self.slots: list[np.ndarray] = []
        self.sums: list[np.ndarray] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, FederatedLoop)
        self.slots.append(module.state.slots.numpy().copy())
        self.sums.append(module.state.sums.numpy().copy())


@pytest.mark.parametrize(("n_init", "recluster_every", "participation"), [(1, 2, 0.5), (4, 1, 1.0)])
def test_no_metadata_follow_from_what_the_server_was_told(
    trainer: Any, context: Any, n_init: int, recluster_every: int, participation: float
) -> None:
    """All sums of all rounds as one linear system in the clients' statistics: no single client solves it."""
    told, data = Told(), planted(12, Rotations([0, 90, 180]))
    method = FLAMECHE(3, 0, n_init=n_init, recluster_every=recluster_every, aggregation="secure_sum")
    loop = FederatedLoop(method, FLAMECHEClient("small_cnn"), participation=participation)
    trainer(8, callbacks=[told]).fit(loop, datamodule=data)
    rows = np.concatenate([(slots[:, None] == np.arange(3)[:, None]).reshape(-1, 12) for slots in told.slots])
    values = np.concatenate([sums.reshape(n_init * 3, -1) for sums in told.sums])
    secret = statistics(loop, context).flatten(1).numpy()
    assert np.allclose(rows @ secret, values, atol=1e-6)  # this is what the server can write down
    rank = np.linalg.matrix_rank(rows.astype(float))
    assert rank >= 3
    for client in range(12):
        assert np.linalg.matrix_rank(np.vstack([rows, np.eye(12)[client]])) == rank + 1, client


def test_metadata_that_the_server_may_not_see_are_in_no_checkpoint_and_come_back(trainer: Any, tmp_path: Any) -> None:
    def fit(rounds: int, **options: Any) -> FederatedLoop:
        loop = FederatedLoop(FLAMECHE(**PROTECTED), FLAMECHEClient("small_cnn", lr=0.1, batch_size=16), cohort_size=6)
        trainer(rounds, folder=f"to{rounds}", enable_checkpointing=True).fit(loop, datamodule=planted(), **options)
        return loop

    whole = fit(4)
    trained = fit(2)
    assert not any(trained.backend.states.get(client) for client in range(8))
    trained.trainer.save_checkpoint(tmp_path / "two.ckpt")
    assert b"metadata/blocks" not in (tmp_path / "two.ckpt").read_bytes()
    resumed = fit(4, ckpt_path=tmp_path / "two.ckpt")
    assert torch.equal(resumed.state.sums, whole.state.sums)
    assert torch.equal(resumed.state.slots, whole.state.slots)


def test_one_start_of_protected_sums_is_noted() -> None:
    data = fedclust.FederatedDataModule("digits", fedclust.Iid(4), transform=fedclust.Rotations(), seed=0)
    method = fedclust.FLAMECHE(2, round_epochs=0, aggregation="secure_sum")
    result = fedclust.federate(method, FLAMECHEClient("linear"), data, rounds=1, progress=False)
    assert any("n_init is 1, as sums are protected" in note for note in result.notes)
