"""FedDCN's rounds: averaging, centres, bytes, collapse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import Callback

import fedclust.algorithms.feddcn as feddcn_module
from fedclust.federation.averaging import weighted_average
from fedclust.federation.backend import InProcess
from fedclust.federation.errors import ClientError
from fedclust.federation.loop import FederatedLoop
from lightning_modules.dcn import DCN

# -- stage 3 ---------------------------------------------------------------------------------------------------------


def test_weights_are_averaged_by_rows_batchnorm_included(run: Any, asked: Any) -> None:
    loop = run(1)
    replies = next(replies for names, _, replies in asked if names == ["update"])
    states = [{n: v for n, v in reply.items() if n.startswith("weights/")} for reply in replies.values()]
    sizes = [reply["n_rows"] for reply in replies.values()]
    assert sizes == [loop.server.sizes[client] for client in range(3)]
    assert len(set(sizes)) == 3
    for name, value in loop.state.weights.items():
        parts = [state[f"weights/{name}"] for state in states]
        if value.dtype == torch.int64:
            assert value.shape == ()
            assert int(value) == max(int(part) for part in parts)
            continue
        by_hand = sum(size * part.double() for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
        assert value.dtype == torch.float32
        assert torch.allclose(value.double(), by_hand, atol=1e-6), name
    assert any("running_mean" in name for name in loop.state.weights)
    assert torch.equal(
        weighted_average(states, sizes)["weights/encoder.0.weight"], loop.state.weights["encoder.0.weight"]
    )


def test_clients_without_a_step_are_not_averaged(run: Any, asked: Any, monkeypatch: Any) -> None:
    original = DCN.update

    def update(self: Any, message: Any, ctx: Any) -> Any:
        return original(self, {**message, "epochs": 0} if ctx.id == 1 else message, ctx)

    update.__fedclust_action__ = True  # type: ignore[attr-defined]
    monkeypatch.setattr(DCN, "update", update)
    loop = run(1)
    assert "client 1 made no training step and was not averaged" in loop.notes
    replies = next(replies for names, _, replies in asked if names == ["update"])
    parts = [replies[client] for client in (0, 2)]
    sizes = [part["n_rows"] for part in parts]
    name = "encoder.0.weight"
    expected = weighted_average([{name: part[f"weights/{name}"]} for part in parts], sizes)[name]
    assert torch.equal(loop.state.weights[name], expected)


def test_server_kmeans_starts_from_the_global_centres_and_keeps_their_numbers(
    run: Any, asked: Any, monkeypatch: Any
) -> None:
    inits: list[torch.Tensor] = []
    original = feddcn_module.kmeans

    def kmeans(x: torch.Tensor, k: int, *, init: torch.Tensor, who: str) -> Any:
        inits.append(init.clone())
        stacked = [reply["centers"] for names, _, replies in asked[-1:] for reply in replies.values()]
        assert torch.equal(x, torch.cat(stacked))
        return original(x, k, init=init, who=who)

    monkeypatch.setattr(feddcn_module, "kmeans", kmeans)
    loop = run(4, algorithm={"pretrain_epochs": 30, "cluster_epochs": 5})
    sent = [shared["centers"] for names, shared, _ in asked if names == ["cluster"]]
    assert all(torch.equal(a, b) for a, b in zip(inits, sent, strict=True))
    for before, after in zip(sent, [*sent[1:], loop.state.centers], strict=True):
        assert torch.cdist(after, before).argmin(1).tolist() == [0, 1, 2]


def test_too_few_populated_centres_keep_the_global_ones(run: Any, monkeypatch: Any) -> None:
    original = DCN.cluster

    def cluster(self: Any, message: Any, ctx: Any) -> Any:
        reply = original(self, message, ctx)
        return {**reply, "populated": torch.tensor([ctx.id == 0, False, False])}

    cluster.__fedclust_action__ = True  # type: ignore[attr-defined]
    before = run(1)
    monkeypatch.setattr(DCN, "cluster", cluster)
    loop = run(1)
    assert "round 1: the clients populated 1 centres in all, fewer than 3; the global centres were kept" in loop.notes
    assert not torch.equal(before.state.centers, loop.state.centers)


def test_shared_synthetic_rows_cross_the_line_once(run: Any) -> None:
    one, two, four = (run(rounds, algorithm={"n_synthetic": 500}).byte_counts() for rounds in (1, 2, 4))
    synthetic = 500 * 6 * 4
    for name in ("update", "cluster"):
        steps = [(b[name]["down"] - a[name]["down"]) / n for a, b, n in ((one, two, 1), (two, four, 2))]
        assert steps[0] == steps[1] < synthetic
    assert one["update"]["down"] > 3 * synthetic
    assert one["cluster"]["down"] < synthetic
    bare = run(1, algorithm={"n_synthetic": 500, "augment": False}).byte_counts()
    assert one["update"]["down"] - bare["update"]["down"] == 3 * synthetic


class Rounds(Callback):
    """The validation metrics of every round."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append({k: v for k, v in pl_module.latest.items() if k.startswith("val/")})


def test_the_trivial_minimum_of_the_clustering_term_shows_in_every_round(
    feddcn: Any, dcn: Any, blobs: Any, trainer: Any
) -> None:  # fmt: skip
    variances = []
    for weights in ({"cluster_weight": 1000.0, "recon_weight": 1e-6}, {"cluster_weight": 0.01, "recon_weight": 1.0}):
        algorithm = feddcn(**weights, pretrain_epochs=1, cluster_epochs=30, round_epochs=10)
        loop, rounds = FederatedLoop(algorithm, dcn(normalization="none")), Rounds()
        trainer(2, callbacks=[rounds]).fit(loop, datamodule=blobs((70, 70, 60)))
        variances.append([metrics["val/latent_variance"] for metrics in rounds.seen])
        assert all({"val/populated", "val/collapsed"} <= metrics.keys() for metrics in rounds.seen)
    assert all(shrunk < 1e-2 * healthy for shrunk, healthy in zip(*variances, strict=True))


def test_a_collapsed_round_is_never_the_best(
    feddcn: Any, dcn: Any, blobs: Any, trainer: Any, monkeypatch: Any
) -> None:  # fmt: skip
    original = DCN.update

    def update(self: Any, message: Any, ctx: Any) -> Any:
        reply = original(self, message, ctx)
        if ctx.round == 2:
            reply["weights/encoder.3.weight"] = torch.zeros_like(reply["weights/encoder.3.weight"])
        return reply

    update.__fedclust_action__ = True  # type: ignore[attr-defined]
    monkeypatch.setattr(DCN, "update", update)
    loop, rounds = FederatedLoop(feddcn(pretrain_epochs=20), dcn()), Rounds()
    runner = trainer(2, monitor="val/dbi", callbacks=[rounds])
    runner.fit(loop, datamodule=blobs((60, 60, 60)))
    assert [metrics["val/collapsed"] for metrics in rounds.seen] == [0.0, 1.0]
    assert (rounds.seen[1]["val/dbi"], rounds.seen[1]["val/populated"]) == (math.inf, 1.0)
    assert "collapsed: on val, round 2, the clustering is degenerate" in loop.notes
    assert torch.load(runner.checkpoint_callback.best_model_path, weights_only=True)["epoch"] == 0


def test_well_separated_blobs_are_found(run: Any, blobs: Any) -> None:
    loop = run(
        3,
        algorithm={"pretrain_epochs": 40, "cluster_epochs": 5},
        data=blobs((60, 60, 60)),
        client={"hidden_dims": [32]},
    )
    assert loop.latest["val/acc"] == loop.latest["val/ari"] == 1.0
    assert loop.latest["val/populated"] == 3.0
    assert loop.latest["val/collapsed"] == 0.0
    assert not any("collapsed" in note for note in loop.notes)


@pytest.mark.slow
def test_rows_and_embedding_stay_paired_in_the_checkpoint(run: Any, tmp_path: Any, monkeypatch: Any) -> None:
    calls: list[tuple[np.ndarray, np.ndarray]] = []
    original = feddcn_module.umap_embedding

    def embed(x: Any, *args: Any, **options: Any) -> Any:
        result = original(x, *args, **options)
        calls.append((np.array(x), result.target.copy()))
        return result

    monkeypatch.setattr(feddcn_module, "umap_embedding", embed)
    loop = run(2, algorithm={"geometry_federated": 0.01, "n_synthetic": 40})
    assert len(calls) == 1  # once on the server, never by a client
    saved = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["fedclust"]["state"]
    rows, target = calls[0]
    for i in (0, 7, 39):
        assert np.array_equal(saved["synthetic"][i].numpy(), rows[i])
        assert np.array_equal(saved["geometry"][i].numpy(), target[i])
    assert torch.equal(saved["geometry"], loop.state.geometry)
    assert "train/geom" in loop.latest


def failing(monkeypatch: Any, name: str, client: int, round: int) -> None:
    """Makes one action of one client fail in one round."""
    original = getattr(DCN, name)

    def fail(self: Any, message: Any, ctx: Any) -> Any:
        if (ctx.id, ctx.round) == (client, round):
            raise OSError("gone")
        return original(self, message, ctx)

    fail.__fedclust_action__ = True  # type: ignore[attr-defined]
    monkeypatch.setattr(DCN, name, fail)


def test_a_round_goes_on_without_a_client_that_fails(run: Any, asked: Any, monkeypatch: Any) -> None:
    failing(monkeypatch, "update", client=1, round=1)
    loop = run(1, backend=InProcess(on_failure="skip"))
    replies = next(replies for names, _, replies in asked if names == ["update"])
    assert sorted(replies) == [0, 2]
    name = "encoder.0.weight"
    parts, sizes = [{name: r[f"weights/{name}"]} for r in replies.values()], [r["n_rows"] for r in replies.values()]
    assert torch.equal(loop.state.weights[name], weighted_average(parts, sizes)[name])
    assert loop.latest["clients/failed"] == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_client_whose_loss_is_not_finite_is_never_averaged(run: Any, monkeypatch: Any, bad: float) -> None:
    original = DCN.update

    def update(self: Any, message: Any, ctx: Any) -> Any:
        if (ctx.id, ctx.round) == (1, 2):
            message = {**message, "synthetic": torch.full_like(message["synthetic"], bad)}
        return original(self, message, ctx)

    update.__fedclust_action__ = True  # type: ignore[attr-defined]
    monkeypatch.setattr(DCN, "update", update)
    with pytest.raises(ClientError, match=r"client 1, round 2, action 'update': NonFiniteLossError: client 1, round 2"):
        run(3)
    loop = run(3, backend=InProcess(on_failure="skip"))
    assert [failure.client for failure in loop.backend.failures] == [1]
    flat = loop.state.to_flat().values()
    assert all(torch.isfinite(value).all() for value in flat if value.is_floating_point())


def test_what_failures_leave_out_is_noted(run: Any, monkeypatch: Any) -> None:
    failing(monkeypatch, "learn_locally", client=1, round=0)
    loop = run(2, backend=InProcess(on_failure="skip"))
    rows = len(loop.state.synthetic)
    assert rows < 30
    assert f"stage 1: {rows} synthetic rows instead of 30, as clients failed" in loop.notes


def test_a_client_lost_between_the_two_trips_counts_in_neither(run: Any, monkeypatch: Any) -> None:
    scores = []
    for name in ("evaluate", "disperse"):
        with monkeypatch.context() as patch:
            failing(patch, name, client=2, round=2)
            scores.append(run(2, backend=InProcess(on_failure="skip")).latest["val/dbi"])
    assert scores[0] == scores[1] != run(2).latest["val/dbi"]
