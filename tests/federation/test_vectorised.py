"""Vectorised: equal to InProcess but for rounding, whatever the clients' sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nets import BODIES, OPTIMIZERS, SIZES, Net, ask, assert_close

from fedclust.data.datamodule import FederatedDataModule
from fedclust.federation.backend import Backend, InProcess
from fedclust.federation.message import Message, tensors_under, with_prefix
from fedclust.federation.vectorised import Vectorised
from lightning_modules.classifier import Classifier


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_elementwise_optimiser_equals_in_process(connect: Any, optimizer: str) -> None:
    expected = ask(connect(InProcess(), Net("BatchNorm", optimizer)))
    assert_close(ask(connect(Vectorised(), Net("BatchNorm", optimizer))), expected)
    assert len({reply["n_steps"] for reply in expected.values()}) > 2


@pytest.mark.parametrize("body", BODIES)
def test_layers_and_statistics_equal_in_process(connect: Any, body: str) -> None:
    expected = ask(connect(InProcess(), Net(body)), epochs=torch.tensor([3, 1, 0, 5, 2]))
    found = ask(connect(Vectorised(), Net(body)), epochs=torch.tensor([3, 1, 0, 5, 2]))
    assert_close(found, expected)
    if "BatchNorm" in body:
        means = [torch.as_tensor(value) for name, value in expected[0].items() if name.endswith("running_mean")]
        assert means[0].abs().max() > 0.01


@pytest.mark.parametrize("per_batch", [1, 2, 32])
def test_the_number_of_clients_per_batch_changes_nothing(connect: Any, per_batch: int) -> None:
    expected = ask(connect(InProcess(), Net("BatchNorm")))
    assert_close(ask(connect(Vectorised(per_batch), Net("BatchNorm"))), expected)


def test_two_runs_are_equal_bit_for_bit(connect: Any) -> None:
    backend = connect(Vectorised(), Net("BatchNorm"))
    assert_close(ask(backend), ask(backend), atol=0.0)


@pytest.mark.parametrize("clip", [0.01, 1.0, 100.0])
def test_clipping_is_per_client(connect: Any, clip: float) -> None:
    assert_close(ask(connect(Vectorised(), Net(clip=clip))), ask(connect(InProcess(), Net(clip=clip))))


class HalfTrained(Net):
    """Its optimiser has the last layer only; the first one's gradients are large."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)  # type: ignore[index]

    def terms(self, batch: Any, factor: float = 1.0) -> dict[str, torch.Tensor]:
        terms = super().terms(batch, factor)
        return {**terms, "loss": terms["loss"] + 1000 * self.net[0].weight.square().sum()}  # type: ignore[index]


def test_clipping_minds_only_what_the_optimiser_has(connect: Any) -> None:
    assert_close(ask(connect(Vectorised(), HalfTrained(clip=0.1))), ask(connect(InProcess(), HalfTrained(clip=0.1))))


def test_clipping_that_only_some_clients_need(connect: Any, monkeypatch: Any) -> None:
    norms: dict[int, list[float]] = {}
    original = Net._step

    def step(self: Any, ctx: Any, *rest: Any) -> Any:
        terms = original(self, ctx, *rest)
        gradients = torch.cat([parameter.grad.flatten() for parameter in self.parameters()])
        norms.setdefault(ctx.id, []).append(float(gradients.norm()))
        return terms

    monkeypatch.setattr(Net, "_step", step)
    ask(connect(InProcess(), Net(clip=None)), epochs=1)
    first = sorted(values[0] for values in norms.values())
    clip = (first[1] + first[2]) / 2  # two clients of five stay below it in their first step
    expected = ask(connect(InProcess(), Net(clip=clip)), epochs=1)
    assert_close(ask(connect(Vectorised(), Net(clip=clip)), epochs=1), expected)
    unclipped = ask(connect(InProcess(), Net(clip=None)), epochs=1)
    norm = {client: float(torch.as_tensor(expected[client]["term/loss"])) for client in expected}
    assert norm != {client: float(torch.as_tensor(unclipped[client]["term/loss"])) for client in unclipped}


# -- the library's own modules --------------------------------------------------------------------------------------


def dcn_replies(backend: Backend, **message: Any) -> dict[int, Message]:
    draw = torch.Generator().manual_seed(0)
    synthetic = torch.rand(30, 6, generator=draw)
    shared: dict[str, Any] = {
        **with_prefix("weights", backend.module.snapshot()), "centers": torch.rand(3, 2, generator=draw),
        "recon_weight": 1.0, "cluster_weight": 0.1, "geometry_weight": 0.5, "synthetic": synthetic,
        "geometry": synthetic[:, :2] * 3, "augment": True, "epochs": 3, **message,
    }  # fmt: skip
    return backend.ask("update", {client: {} for client in range(backend.data.n_clients)}, shared=shared)


@pytest.mark.parametrize("augment", [True, False])
def test_dcn_with_batch_norm_equals_in_process(connect: Any, dcn: Any, augment: bool) -> None:
    """But for biases before a BatchNorm: their gradient is 0 but for rounding, which Adam blows up to whole steps."""
    found, expected = (dcn_replies(connect(kind(), dcn()), augment=augment) for kind in (Vectorised, InProcess))
    for replies in (found, expected):
        for reply in replies.values():
            for part in ("encoder", "decoder"):
                for name in (f"weights/{part}.0.bias", f"weights/{part}.1.running_mean"):
                    reply[name] = torch.zeros(8)
    assert_close(found, expected)


@pytest.mark.parametrize("normalization", ["group", "none"])
def test_dcn_moves_its_centres_between_epochs_as_in_process(connect: Any, dcn: Any, normalization: str) -> None:
    plan = {"pretrain_epochs": 2, "cluster_epochs": 3, "n_neighbors": 5, "min_dist": 0.1, "counts": "assigned",
            "sampling": "diagonal", "recon_weight": 1.0, "cluster_weight": 0.5, "geometry_weight": 0.0}  # fmt: skip
    replies = []
    for kind in (Vectorised, InProcess):
        backend = connect(kind(), dcn(normalization=normalization))
        shared = {**with_prefix("weights", backend.module.snapshot()), **plan}
        replies.append(backend.ask("learn_locally", {client: {} for client in range(len(SIZES))}, shared=shared))
    assert_close(*replies)


def test_bf16_mixed_is_close_to_in_process(connect: Any, dcn: Any) -> None:
    found, expected = (
        dcn_replies(connect(kind(), dcn(normalization="group"), precision="bf16-mixed"))
        for kind in (Vectorised, InProcess)
    )
    exact = dcn_replies(connect(InProcess(), dcn(normalization="group")))
    assert_close(found, expected, atol=0.02)
    for client, reply in found.items():
        assert all(value.dtype in (torch.float32, torch.int64) for value in tensors_under("weights", reply).values())
        assert not torch.equal(reply["weights/encoder.0.weight"], exact[client]["weights/encoder.0.weight"])


@pytest.mark.parametrize("network", ["small_cnn", "mlp", "linear"])
def test_classifiers_of_images_equal_in_process(network: Any) -> None:
    rng = np.random.default_rng(0)
    rows = [(rng.random((n, 1, 8, 8)).astype(np.float32), np.arange(n) % 3) for n in (1, 5, 20, 33)]
    data = FederatedDataModule(rows, seed=0, val_fraction=0.0, test_fraction=0.0)
    replies = []
    for backend in (Vectorised(), InProcess()):
        module = Classifier(network, lr=0.1, momentum=0.9, batch_size=8, max_grad_norm=1.0)
        module.build(data.input_shape, data.n_classes)
        module.initialize(0)
        backend.connect(module, data, seed=0, device=torch.device("cpu"), precision="32-true")
        shared = {**with_prefix("weights", module.snapshot()), "epochs": 2}
        replies.append(backend.ask("update", {client: {} for client in range(4)}, shared=shared))
    assert_close(*replies)
