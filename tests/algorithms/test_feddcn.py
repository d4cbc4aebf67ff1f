"""FedDCN before its rounds: arguments, checks before any training, what stage 1 sends and draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import fedclust
import fedclust.algorithms.feddcn as feddcn_module
from fedclust.algorithms.feddcn import FedDCN
from fedclust.clustering.geometry import Embedding
from fedclust.data.datamodule import FederatedDataModule
from fedclust.federation.errors import ClientError
from fedclust.federation.loop import FederatedLoop
from lightning_modules.dcn import DCN

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
    zero = (
        "cluster_weight",
        "geometry_pretrain",
        "geometry_federated",
        "pretrain_epochs",
        "cluster_epochs",
        "min_dist",
    )
    FedDCN(**dict.fromkeys(zero, 0), round_epochs=1, n_synthetic=1, n_neighbors=2)
    FedDCN(recon_weight=0, geometry_pretrain=0.1, geometry_federated=0.1, min_dist=1.0)
    with pytest.raises(ValueError, match=r"recon_weight 0"):
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
    with pytest.raises(ValueError, match=r"client 1 has 6 training rows, fewer than the 10 that n_clusters=10 needs"):
        run(client={"n_clusters": 10}, data=blobs((40, 6, 30), val_fraction=0.0, test_fraction=0.0))
    with pytest.raises(ValueError, match=r"synthetic set \(n_synthetic\) has 2 training rows"):
        run(algorithm={"n_synthetic": 2})


@pytest.mark.usefixtures("untrained")
def test_umap_s_limits_are_checked_before_training(run: Any, blobs: Any) -> None:
    data = blobs((40, 5, 30), val_fraction=0.0, test_fraction=0.0)
    wide = {"latent_dim": 4}
    for betas in ({"geometry_pretrain": 0.1}, {"geometry_pretrain": 0.1, "geometry_federated": 0.1}):
        with pytest.raises(ValueError, match=r"client 1: UMAP into 4 dimensions needs at least 6 rows, got 5"):
            run(algorithm=betas, client=wide, data=data)
    with pytest.raises(ValueError, match=r"the synthetic set.*UMAP into 4 dimensions needs at least 6 rows, got 5"):
        run(algorithm={"geometry_federated": 0.1, "n_synthetic": 5}, client=wide, data=data)
    with pytest.raises(ClientError, match=r"training began"):  # only the synthetic set is embedded then
        run(algorithm={"geometry_federated": 0.1}, client=wide, data=data)


def test_other_client_modules_are_refused(toy: Any, feddcn: Any, blobs: Any, trainer: Any) -> None:
    with pytest.raises(TypeError, match=r"lightning_modules.DCN; ToyClient lacks \['n_clusters'"):
        trainer().fit(FederatedLoop(feddcn(), toy.client()), datamodule=blobs())


# -- stage 1 ---------------------------------------------------------------------------------------------------------


def test_all_clients_start_from_the_same_weights_drawn_from_the_seed(
    run: Any, asked: Any, dcn: Any, blobs: Any
) -> None:
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
    assert notes == ["stage 1: no point lies within one σ of a centre at clients 0; assigned counts were used"]
    replies = asked[0][2]
    assert (replies[0]["counts_fell_back"], replies[1]["counts_fell_back"]) == (True, False)
    assert sorted(replies[0]["counts"].tolist()) == [10, 10]
    assert len(loop.state.synthetic) == 30


def test_a_client_of_two_distinct_rows_is_reported_and_trains_on(run: Any, blob_arrays: Any) -> None:
    two = np.repeat(np.array([[0.1] * 6, [0.9] * 6], dtype=np.float32), 10, axis=0)
    data = FederatedDataModule(
        [x for x, _ in blob_arrays((30, 30))] + [two], seed=0, val_fraction=0.2, test_fraction=0.2
    )
    loop = run(2, client={"n_clusters": 4}, data=data)
    assert "stage 1: fewer than 4 clusters populated at clients 2; clients.csv has them" in loop.notes
    assert loop.server.client_values[2]["local_populated"] == 2
    assert loop.server.client_values[2]["local_populated"] == 2
    flat = loop.state.to_flat()
    assert all(torch.isfinite(value).all() for value in flat.values() if value.is_floating_point())
    assert len({tuple(center.tolist()) for center in loop.state.centers}) == 4


@pytest.mark.parametrize(("covariance", "power"), [("sigma_squared", 1.0), ("sigma", 0.5)])
def test_spread_and_covariance_are_passed_on(
    run: Any, asked: Any, monkeypatch: Any, covariance: str, power: float
) -> None:
    """K5: the sample's standard deviation is σ for covariance σ²I and √σ for σI."""
    drawn: list[torch.Tensor] = []
    original = feddcn_module.sample_latents
    monkeypatch.setattr(
        feddcn_module, "sample_latents", lambda *a, **k: drawn.append(original(*a, **k)) or drawn[-1]
    )  # fmt: skip
    run(algorithm={"n_synthetic": 4000, "covariance": covariance, "sampling": "isotropic"}, client={"batch_size": 64})
    reply = asked[0][2][0]
    counts = feddcn_module.allocate_rows(len(drawn[0]), reply["counts"])
    for center, sigma, part in zip(reply["centers"], reply["spread"], drawn[0].split(counts.tolist()), strict=True):
        assert part.std(0).tolist() == pytest.approx([float(sigma) ** power] * 2, rel=0.15)
        assert torch.allclose(part.mean(0), center, atol=0.1 * float(sigma) ** power)


def test_stages_one_and_two_run_their_epochs(run: Any, monkeypatch: Any) -> None:
    epochs: list[tuple[str, int]] = []
    original = DCN.fit_locally
    monkeypatch.setattr(
        DCN, "fit_locally", lambda self, ctx, n, **more: epochs.append((ctx.who, n)) or original(self, ctx, n, **more)
    )  # fmt: skip
    run(2, algorithm={"pretrain_epochs": 4, "cluster_epochs": 3, "round_epochs": 2})
    assert epochs[:8] == [(who, n) for who in ("client 0", "client 1", "client 2", "server") for n in (4, 3)]
    assert epochs[8:] == [(f"client {client}", 2) for client in (0, 1, 2)] * 2


def test_a_term_that_is_never_computed_is_no_metric() -> None:
    method = fedclust.FedDCN(geometry_pretrain=0.0, geometry_federated=0.0)
    assert {"train/geom", "train/recon"} & method.metric_names(labels=False) == {"train/recon"}
