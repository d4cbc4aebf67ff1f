"""The DCN module: layers, loss terms by hand, gradients, precision, what is exchanged, privacy layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fedclust
from fedclust.federation.checkpoint import plain_arguments
from fedclust.privacy.layers import require_per_sample_layers
from lightning_modules.dcn import DCN
from lightning_modules.dcn_base import nearest
from lightning_modules.dcn_plan import LocalPlan, LossWeights, plan_of, weights_of


def rows(n: int, d: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed))


def shape_of(network: nn.Sequential) -> list[Any]:
    return [
        (type(layer).__name__, layer.in_features, layer.out_features) if isinstance(layer, nn.Linear)
        else (type(layer).__name__, layer.num_features) if isinstance(layer, nn.BatchNorm1d)
        else type(layer).__name__
        for layer in network
    ]  # fmt: skip


@pytest.mark.parametrize("output", ["sigmoid", "linear"])
def test_layers(output: Any) -> None:
    module = DCN(n_clusters=4, hidden_dims=[7, 5], latent_dim=3, input_dim=9, output=output)
    assert shape_of(module.encoder) == [
        ("Linear", 9, 7), ("BatchNorm1d", 7), "ReLU", ("Linear", 7, 5), ("BatchNorm1d", 5), "ReLU", ("Linear", 5, 3)
    ]  # fmt: skip
    decoder = [
        ("Linear", 3, 5), ("BatchNorm1d", 5), "ReLU", ("Linear", 5, 7), ("BatchNorm1d", 7), "ReLU", ("Linear", 7, 9)
    ]  # fmt: skip
    assert shape_of(module.decoder) == decoder + (["UnitInterval"] if output == "sigmoid" else [])
    assert all(layer.bias is not None for layer in module.modules() if isinstance(layer, nn.Linear))
    x = 100 * rows(20, 9) - 50
    inside = bool(((module.decode(100 * module.encode(x)) >= 0) & (module.decode(100 * module.encode(x)) <= 1)).all())
    assert inside == (output == "sigmoid")


@pytest.mark.parametrize(("d", "k"), [(3, 10), (16, 4), (1, 2), (2, 1)])
@pytest.mark.parametrize("shape", [(6,), (1, 2, 3)])
def test_latent_width_and_number_of_clusters_are_independent(d: int, k: int, shape: tuple[int, ...]) -> None:
    module = DCN(n_clusters=k, hidden_dims=[8], latent_dim=d, batch_size=8)
    module.build(shape, None)
    x = rows(12).reshape(12, *shape)
    assert module.encode(x).shape == (12, d)
    assert module.decode(module.encode(x)).shape == (12, 6)
    assert module.centers.shape == (k, d)
    module.cluster_rows(x, seed=0)
    assert module(x).shape == (12,)
    assert set(module(x).tolist()) <= set(range(k))


def test_exchanged_are_parameters_and_batchnorm_buffers_and_not_the_centres(dcn: Any) -> None:
    module = dcn(input_dim=6)
    names = set(module.exchanged())
    buffers = {f"{part}.1.{name}" for part in ("encoder", "decoder") for name in
               ("running_mean", "running_var", "num_batches_tracked")}  # fmt: skip
    assert names == {name for name, _ in module.named_parameters()} | buffers
    assert not any("centers" in name for name in names)
    assert "centers" in module.state_dict()
    assert set(module.decoder_tensors()) == {name[len("decoder.") :] for name in names if name.startswith("decoder.")}


def test_loading_a_decoder_leaves_the_encoder(dcn: Any) -> None:
    module, other = dcn(input_dim=6), dcn(input_dim=6)
    module.initialize(0)
    other.initialize(1)
    before = module.snapshot()
    module.load_decoder(other.decoder_tensors())
    for name, value in module.snapshot().items():
        assert torch.equal(value, (other.snapshot() if name.startswith("decoder.") else before)[name])


def by_hand(module: DCN, x: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """The three terms, entry by entry, in Python floats."""
    z, back = module.encode(x).tolist(), module.decode(module.encode(x)).tolist()
    n, d, m, centers = len(z), len(z[0]), x.shape[1], module.centers.tolist()
    recon = sum((a - b) ** 2 for r, s in zip(x.tolist(), back, strict=True) for a, b in zip(r, s, strict=True)) / (
        n * m
    )
    clust = sum(min(sum((a - b) ** 2 for a, b in zip(r, c, strict=True)) for c in centers) for r in z) / n
    geom = sum((a - b) ** 2 for r, t in zip(z, target.tolist(), strict=True) for a, b in zip(r, t, strict=True)) / (
        n * d
    )
    return {"recon": recon, "clust": clust, "geom": geom}


@pytest.fixture
def ready(dcn: Any) -> DCN:
    module = dcn(input_dim=6)
    module.initialize(3)
    module.eval()  # so that the terms of one batch can be computed apart
    module.centers.copy_(torch.tensor([[0.0, 0.1], [1.0, -1.0], [-0.5, 0.5]]))
    return module


@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 3, 5)])
def test_the_terms_and_their_sum_by_hand(ready: DCN, weights: tuple[int, int, int]) -> None:
    x, target = rows(7), rows(7, 2, seed=1)
    expected = by_hand(ready, x, target)
    terms = {name: float(value.detach()) for name, value in
             ready.terms({"x": x, "target": target}, LossWeights(*map(float, weights))).items()}  # fmt: skip
    total = sum(weight * value for weight, value in zip(weights, expected.values(), strict=True))
    assert terms.pop("loss") == pytest.approx(total, rel=1e-5)
    used = {name for name, weight in zip(expected, weights, strict=True) if weight}
    assert terms == pytest.approx({name: expected[name] for name in used}, rel=1e-5)


def test_geometry_may_come_from_rows_of_its_own(ready: DCN) -> None:
    x, other, target = rows(7), rows(4, seed=2), rows(4, 2, seed=1)
    weights = LossWeights(2.0, 3.0, 5.0)
    terms = ready.terms({"x": x, "geometry_x": other, "target": target}, weights)
    expected = by_hand(ready, x, rows(7, 2)) | {"geom": by_hand(ready, other, target)["geom"]}
    assert float(terms["loss"].detach()) == pytest.approx(
        2 * expected["recon"] + 3 * expected["clust"] + 5 * expected["geom"], rel=1e-5
    )


def test_rows_without_target_have_no_geometric_term(ready: DCN) -> None:
    assert ready.terms({"x": rows(7)}, LossWeights(1.0, 0.0, 5.0)).keys() == {"loss", "recon"}


def test_gradients_are_zero_at_centre_and_target_and_finite(ready: DCN) -> None:
    x = rows(3)
    z = ready.encode(x).detach()
    ready.centers.copy_(z)
    for weights, target in ((LossWeights(0.0, 1.0, 0.0), None), (LossWeights(0.0, 0.0, 1.0), z)):
        ready.zero_grad()
        batch = {"x": x} if target is None else {"x": x, "target": target}
        terms = ready.terms(batch, weights)
        assert float(terms["loss"].detach()) == 0.0
        terms["loss"].backward()
        for parameter in ready.encoder.parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_centres_have_no_gradient(ready: DCN) -> None:
    ready.terms({"x": rows(5)}, LossWeights(1.0, 1.0, 0.0))["loss"].backward()
    assert ready.centers.grad is None
    assert not ready.centers.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_terms_are_float32_and_finite_under_autocast_with_large_latents(ready: DCN, dtype: torch.dtype) -> None:
    with torch.no_grad():
        ready.encoder[-1].weight.zero_()
        ready.encoder[-1].bias.copy_(torch.tensor([300.0, -300.0]))
    ready.centers.zero_()
    batch = {"x": rows(6), "target": torch.zeros(6, 2)}
    with torch.autocast("cpu", dtype):
        terms = ready.terms(batch, LossWeights(1.0, 1.0, 1.0))
        terms["loss"].backward()
    assert {value.dtype for value in terms.values()} == {torch.float32}
    assert float(terms["clust"].detach()) == pytest.approx(180_000, rel=5e-3)  # overflows in float16
    assert float(terms["geom"].detach()) == pytest.approx(90_000, rel=5e-3)
    assert all(torch.isfinite(p.grad).all() for p in ready.encoder.parameters())


def test_latents_and_decoding_ignore_an_autocast_around_them(ready: DCN) -> None:
    x = rows(9)
    plain = ready.latents(x), ready.decode_rows(ready.latents(x))
    with torch.autocast("cpu", torch.bfloat16):
        inside = ready.latents(x), ready.decode_rows(ready.latents(x))
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))
    ready.train()
    assert torch.allclose(ready.latents(x[:1]), ready.latents(x)[:1], atol=1e-6)
    assert not ready.training


def test_decoded_rows_are_clamped_with_the_sigmoid_only() -> None:
    for output in ("sigmoid", "linear"):
        module = DCN(n_clusters=2, hidden_dims=[4], latent_dim=2, input_dim=5, output=output)  # type: ignore[arg-type]
        module.initialize(0)
        with torch.no_grad():
            module.decoder[3].bias.copy_(torch.tensor([9.0, -9.0, 2.0, 0.0, -2.0]))
        low, high = (float(f(module.decode_rows(torch.zeros(3, 2)))) for f in (torch.min, torch.max))
        assert (low >= 0) == (output == "sigmoid")
        assert (high <= 1) == (output == "sigmoid")


def test_nearest_takes_the_lower_index_on_ties() -> None:
    centers = torch.tensor([[0.0], [2.0], [0.0]])
    assert nearest(torch.tensor([[0.0], [1.0], [5.0]]), centers).tolist() == [0, 0, 1]


def test_assignments_are_the_nearest_centre_and_its_euclidean_distance(ready: DCN) -> None:
    x = rows(11)
    labels, distances = ready.assignments(x)
    full = torch.cdist(ready.latents(x), ready.centers)
    assert torch.equal(labels, full.argmin(1))
    assert torch.allclose(distances, full.min(1).values, atol=1e-5)
    assert (labels.dtype, distances.dtype) == (torch.int64, torch.float32)
    empty = ready.assignments(x[:0])
    assert [len(part) for part in empty] == [0, 0]


def test_hyperparameters_are_plain_and_rebuild_the_module(dcn: Any) -> None:
    module = dcn(hidden_dims=(8, 4))
    module.build((1, 2, 3), 4)
    arguments = plain_arguments(module.hparams)
    assert arguments["hidden_dims"] == [8, 4]
    assert arguments["input_dim"] == 6
    again = DCN(**arguments)
    assert {n: v.shape for n, v in again.state_dict().items()} == {n: v.shape for n, v in module.state_dict().items()}


def test_building_twice_is_harmless_but_not_for_other_rows(dcn: Any) -> None:
    module = dcn(input_dim=6)
    weight = module.encoder[0].weight
    module.build((2, 3), 5)
    assert module.encoder[0].weight is weight
    with pytest.raises(ValueError, match=r"built for rows of 6 features, the data has 7"):
        module.build((7,), None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_clusters": 0}, "n_clusters"), ({"n_clusters": 2.0}, "n_clusters"), ({"latent_dim": -1}, "latent_dim"),
        ({"hidden_dims": []}, "hidden_dims"), ({"hidden_dims": [8, 0]}, r"hidden_dims\[1\]"),
        ({"lr": 0.0}, "lr"), ({"lr": math.nan}, "lr"), ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": 1}, "batch_size must be at least 2 with normalization='batch'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"), ({"output": "tanh"}, "output.*sigmoid, linear.*tanh"),
        ({"normalization": "layer"}, "normalization"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments_are_named(dcn: Any, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        dcn(**change)


def test_weights_and_plans_are_read_from_messages_and_checked() -> None:
    message = {"recon_weight": 1, "cluster_weight": 0.5, "geometry_weight": 0.0, "pretrain_epochs": 3,
               "cluster_epochs": 2, "n_neighbors": 15, "min_dist": 0.1}  # fmt: skip
    assert weights_of(message) == LossWeights(1.0, 0.5, 0.0)
    assert plan_of(message) == LocalPlan(LossWeights(1.0, 0.5, 0.0), 3, 2, 15, 0.1)
    for name, value in (("recon_weight", "1"), ("pretrain_epochs", 1.5), ("cluster_epochs", True)):
        with pytest.raises(TypeError, match=name):
            plan_of({**message, name: value})
    for bad in ((-1.0, 0.0, 1.0), (math.nan, 1.0, 1.0), (1.0, math.inf, 0.0), (0.0, 0.0, 0.0)):
        with pytest.raises(ValueError, match=r"loss weight"):
            LossWeights(*bad)


def test_batchnorm_is_refused_for_privacy_per_sample_and_the_group_variant_passes(dcn: Any) -> None:
    with pytest.raises(ValueError, match=r"encoder.1 \(BatchNorm1d\).*decoder.1 \(BatchNorm1d\).*GroupNorm"):
        require_per_sample_layers(dcn(input_dim=6))
    for kind, width in (("group", 8), ("group", 5), ("none", 8)):
        module = dcn(input_dim=6, normalization=kind, hidden_dims=[width], batch_size=1)
        require_per_sample_layers(module)
        require_per_sample_layers(module)
        assert set(module.exchanged()) == {name for name, _ in module.named_parameters()}
        module.train()
        alone = module.encode(rows(3)[:1])
        assert torch.allclose(alone, module.encode(rows(3))[:1], atol=1e-6)


@pytest.mark.parametrize(("width", "groups"), [(5, 1), (8, 1), (16, 2), (24, 3), (60, 6), (64, 8), (256, 8), (1000, 8)])
def test_groups_keep_the_signal(width: int, groups: int) -> None:
    module = DCN(n_clusters=2, hidden_dims=[width], latent_dim=2, input_dim=6, normalization="group")
    module.initialize(0)
    assert module.encoder[1].num_groups == groups
    assert module.encode(rows(20)).std(0).min() > 1e-3


def test_central_training_refuses_other_precisions(tmp_path: Any) -> None:
    import pytorch_lightning as pl

    data = fedclust.FederatedDataModule("digits", fedclust.Iid(2), seed=0)
    trainer = pl.Trainer(
        precision="bf16-true", max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path
    )
    with pytest.raises(ValueError, match="precision 'bf16-true' cannot be used"):
        trainer.fit(DCN(10, hidden_dims=[16], latent_dim=2), data)
