"""FedDCN, server side: arguments, checks before training, what each stage sends, draws and averages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import Callback

import fedclust.algorithms.feddcn as feddcn_module
from fedclust.algorithms.feddcn import FedDCN
from fedclust.clustering.geometry import Embedding
from fedclust.data.datamodule import FederatedDataModule
from fedclust.federation.averaging import weighted_average
from fedclust.federation.backend import Backend
from fedclust.federation.errors import ClientError
from fedclust.federation.loop import FederatedLoop
from lightning_modules.dcn import DCN


@pytest.fixture
def run(feddcn: Any, dcn: Any, blobs: Any, trainer: Any) -> Any:
    """Fits FedDCN on the blobs; `algorithm`, `client` and `data` are changes to the defaults."""

    def start(rounds: int = 1, *, algorithm: Any = (), client: Any = (), data: Any = None, **more: Any) -> FederatedLoop:
        loop = FederatedLoop(feddcn(**dict(algorithm)), dcn(**dict(client)), more.pop("backend", None), **more)
        trainer(rounds).fit(loop, datamodule=blobs() if data is None else data)
        return loop

    return start


@pytest.fixture
def asked(monkeypatch: Any) -> list[tuple[list[str], dict[str, Any], dict[int, Any]]]:
    """Every question of a run: actions, shared values, and the replies by client."""
    log: list[Any] = []
    original = Backend.ask

    def ask(self: Any, actions: Any, to: Any, *, shared: Any = None, on_reply: Any = None) -> Any:
        names = [actions] if isinstance(actions, str) else list(actions)
        replies: dict[int, Any] = {}
        log.append((names, dict(shared or {}), replies))

        def keep(client: int, reply: Any) -> None:
            replies[client] = reply
            if on_reply is not None:
                on_reply(client, reply)

        original(self, actions, to, shared=shared, on_reply=keep)
        return {} if on_reply is not None else dict(replies)

    monkeypatch.setattr(Backend, "ask", ask)
    return log


# -- arguments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("recon_weight", [-1, math.nan, math.inf, "1", True, None]), ("cluster_weight", [-0.1, math.inf]),
        ("geometry_pretrain", [-1e-9, "x"]), ("geometry_federated", [math.nan]), ("min_dist", [-0.1, 1.1, math.nan]),
        ("pretrain_epochs", [-1, 1.5, True, "3"]), ("cluster_epochs", [-1, None]), ("round_epochs", [0, 2.0]),
        ("n_synthetic", [0, -5, 1e3]), ("n_neighbors", [1, 0, 2.5]), ("sampling", ["full", None, 1]),
        ("counts", ["all", ""]), ("covariance", ["variance"]),
    ],
)  # fmt: skip
def test_bad_arguments_are_named_with_their_value(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name) as caught:
            FedDCN(**{name: value})
        assert repr(value) in str(caught.value)


def test_borders_are_allowed() -> None:
    FedDCN(cluster_weight=0, geometry_pretrain=0, geometry_federated=0, pretrain_epochs=0, cluster_epochs=0, round_epochs=1,
           n_synthetic=1, n_neighbors=2, min_dist=0)  # fmt: skip
    FedDCN(recon_weight=0, geometry_pretrain=0.1, geometry_federated=0.1, min_dist=1.0)
    with pytest.raises(ValueError, match="recon_weight 0"):
        FedDCN(recon_weight=0, geometry_pretrain=0.1, geometry_federated=0)


# -- checks before training ------------------------------------------------------------------------------------------


@pytest.fixture
def untrained(monkeypatch: Any) -> None:
    """Fails as soon as anything is trained."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("training began")

    monkeypatch.setattr(DCN, "fit_locally", fail)


@pytest.mark.usefixtures("untrained")
def test_a_client_with_fewer_rows_than_clusters_is_named_before_training(run: Any, blobs: Any) -> None:
    with pytest.raises(ValueError, match="client 1 has 6 training rows, fewer than the 10 that n_clusters=10 needs"):
        run(client={"n_clusters": 10}, data=blobs((40, 6, 30), val_fraction=0.0, test_fraction=0.0))
    with pytest.raises(ValueError, match=r"synthetic set \(n_synthetic\) has 2 training rows"):
        run(algorithm={"n_synthetic": 2})


@pytest.mark.usefixtures("untrained")
def test_umap_s_limits_are_checked_before_training(run: Any, blobs: Any) -> None:
    data = blobs((40, 5, 30), val_fraction=0.0, test_fraction=0.0)
    wide = {"latent_dim": 4}
    for betas in ({"geometry_pretrain": 0.1}, {"geometry_pretrain": 0.1, "geometry_federated": 0.1}):
        with pytest.raises(ValueError, match="client 1: UMAP into 4 dimensions needs at least 6 rows, got 5"):
            run(algorithm=betas, client=wide, data=data)
    with pytest.raises(ValueError, match="the synthetic set.*UMAP into 4 dimensions needs at least 6 rows, got 5"):
        run(algorithm={"geometry_federated": 0.1, "n_synthetic": 5}, client=wide, data=data)
    with pytest.raises(ClientError, match="training began"):  # only the synthetic set is embedded then
        run(algorithm={"geometry_federated": 0.1}, client=wide, data=data)


def test_other_client_modules_are_refused(toy: Any, feddcn: Any, blobs: Any, trainer: Any) -> None:
    with pytest.raises(TypeError, match=r"lightning_modules.DCN; ToyClient lacks \['n_clusters'"):
        trainer().fit(FederatedLoop(feddcn(), toy.client()), datamodule=blobs())


# -- stage 1 ---------------------------------------------------------------------------------------------------------


def test_all_clients_start_from_the_same_weights_drawn_from_the_seed(run: Any, asked: Any, dcn: Any, blobs: Any) -> None:
    torch.manual_seed(99)
    run()
    expected = dcn(input_dim=6)
    expected.initialize(0)
    names, shared, _ = asked[0]
    assert names == ["learn_locally"]
    for name, value in expected.snapshot().items():
        assert torch.equal(shared[f"weights/{name}"], value)


def first_coordinates(x: Any, d: int, **_: Any) -> Embedding:
    return Embedding(target=np.asarray(x)[:, :d].astype(np.float32).copy(), n_neighbors=5, init="spectral")


def test_the_plan_of_each_stage_has_its_own_beta(run: Any, asked: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(feddcn_module, "umap_embedding", first_coordinates)
    monkeypatch.setattr("lightning_modules.dcn_base.umap_embedding", first_coordinates)
    plans: list[Any] = []
    original = DCN.local_dcn
    monkeypatch.setattr(
        DCN, "local_dcn", lambda self, ctx, x, plan, target=None: plans.append((ctx.who, plan, target))
        or original(self, ctx, x, plan, target),
    )  # fmt: skip
    betas = {"geometry_pretrain": 0.3, "geometry_federated": 0.007, "recon_weight": 2.0, "cluster_weight": 0.5}
    loop = run(algorithm=betas)
    assert [who for who, _, _ in plans] == ["client 0", "client 1", "client 2", "server"]
    for _, plan, _ in plans:
        assert (plan.weights.recon, plan.weights.clust, plan.weights.geom) == (2.0, 0.5, 0.3)
    assert all(target is None for _, _, target in plans[:3])
    assert torch.equal(plans[3][2], loop.state.geometry)
    update = next(shared for names, shared, _ in asked if names == ["update"])
    assert (update["recon_weight"], update["cluster_weight"], update["geometry_weight"]) == (2.0, 0.5, 0.007)
    assert torch.equal(update["geometry"], loop.state.geometry)


@pytest.mark.parametrize("n_synthetic", [30, 31, 97])
@pytest.mark.parametrize("counts", ["within_sigma", "assigned"])
def test_the_synthetic_set_has_exactly_its_rows_split_by_rows_and_points(
    run: Any, asked: Any, monkeypatch: Any, n_synthetic: int, counts: str
) -> None:
    drawn: list[list[int]] = []
    original = feddcn_module.sample_latents
    monkeypatch.setattr(
        feddcn_module, "sample_latents",
        lambda centers, spread, rows, **more: drawn.append(list(rows)) or original(centers, spread, rows, **more),
    )  # fmt: skip
    loop = run(algorithm={"n_synthetic": n_synthetic, "counts": counts, "sampling": "isotropic"})
    assert len(loop.state.synthetic) == n_synthetic
    sizes = [loop.server.sizes[client] for client in range(3)]
    for shares, size, reply in zip(drawn, sizes, asked[0][2].values(), strict=True):
        assert abs(sum(shares) - n_synthetic * size / sum(sizes)) < 1
        points = reply["counts"].double()
        exact = sum(shares) * points / points.sum()
        assert (torch.tensor(shares) - exact).abs().max() < 1
        assert int(points.sum()) == size if counts == "assigned" else int(points.sum()) < size


@pytest.mark.parametrize("output", ["sigmoid", "linear"])
def test_rows_are_decoded_by_their_client_s_decoder_in_evaluation_mode(
    run: Any, asked: Any, dcn: Any, monkeypatch: Any, output: str
) -> None:
    latents: list[torch.Tensor] = []
    original = feddcn_module.sample_latents
    monkeypatch.setattr(
        feddcn_module, "sample_latents",
        lambda *a, **k: latents.append(original(*a, **k)) or latents[-1],
    )  # fmt: skip
    loop = run(client={"output": output})
    expected = []
    for z, reply in zip(latents, asked[0][2].values(), strict=True):
        module = dcn(input_dim=6, output=output)
        module.load_decoder({n.removeprefix("decoder/"): v for n, v in reply.items() if n.startswith("decoder/")})
        expected.append(module.eval().decode(z).detach())
    assert torch.allclose(loop.state.synthetic, torch.cat(expected), atol=1e-6)
    assert not loop.state.synthetic.requires_grad


def test_a_client_without_points_within_sigma_falls_back_and_says_so(run: Any, asked: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(DCN, "latents", lambda self, x: x.flatten(1)[:, :2].clone())
    # Two pairs of rows, each pair at equal distances from its mean: σ is 0, and no row lies on a centre.
    x = np.array([[0, 0], [0, 0.2], [1, 0], [1, 0.2]] * 5, dtype=np.float32)
    x = np.concatenate([x, np.zeros((20, 2), dtype=np.float32)], axis=1)
    other = np.random.default_rng(0).random((20, 4)).astype(np.float32)
    data = FederatedDataModule([x, other], seed=0, val_fraction=0.0, test_fraction=0.0)
    loop = run(algorithm={"counts": "within_sigma", "sampling": "isotropic"}, client={"n_clusters": 2}, data=data)
    notes = [note for note in loop.notes if "within one σ" in note]
    assert notes == ["client 0, stage 1: no point lies within one σ of a centre; assigned counts were used"]
    replies = asked[0][2]
    assert (replies[0]["counts_fell_back"], replies[1]["counts_fell_back"]) == (True, False)
    assert sorted(replies[0]["counts"].tolist()) == [10, 10]
    assert len(loop.state.synthetic) == 30


def test_a_client_of_two_distinct_rows_is_reported_and_trains_on(run: Any, blob_arrays: Any) -> None:
    two = np.repeat(np.array([[0.1] * 6, [0.9] * 6], dtype=np.float32), 10, axis=0)
    data = FederatedDataModule([x for x, _ in blob_arrays((30, 30))] + [two], seed=0, val_fraction=0.2, test_fraction=0.2)
    loop = run(2, client={"n_clusters": 4}, data=data)
    assert "client 2, stage 1: 2 of 4 clusters populated" in loop.notes
    assert loop.server.client_values[2]["local_populated"] == 2
    flat = loop.state.to_flat()
    assert all(torch.isfinite(value).all() for value in flat.values() if value.is_floating_point())
    assert len({tuple(center.tolist()) for center in loop.state.centers}) == 4


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


def test_server_kmeans_starts_from_the_global_centres_and_keeps_their_numbers(run: Any, asked: Any, monkeypatch: Any) -> None:
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


def test_a_trivial_minimum_is_reported_as_collapsed(feddcn: Any, dcn: Any, blobs: Any, trainer: Any) -> None:
    algorithm = feddcn(cluster_weight=1000.0, recon_weight=1e-6, pretrain_epochs=1, cluster_epochs=30, round_epochs=10)
    loop, rounds = FederatedLoop(algorithm, dcn()), Rounds()
    trainer(6, callbacks=[rounds]).fit(loop, datamodule=blobs((70, 70, 60)))
    collapsed = [number for number, metrics in enumerate(rounds.seen, 1) if metrics["val/collapsed"]]
    assert collapsed
    assert all(rounds.seen[number - 1]["val/dbi"] == math.inf for number in collapsed)
    notes = [note for note in loop.notes if note.startswith("collapsed: on val")]
    assert [f"round {number}," in note for number, note in zip(collapsed, notes, strict=True)] == [True] * len(notes)
    assert all(metrics["val/latent_variance"] < 1e-3 for metrics in rounds.seen[1:])


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
    loop = run(3, algorithm={"pretrain_epochs": 40, "cluster_epochs": 5}, data=blobs((60, 60, 60)), client={"hidden_dims": [32]})
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
