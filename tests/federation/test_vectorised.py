"""Vectorised: equal to InProcess but for rounding, whatever the clients' sizes; padding enters nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedclust.federation import padding
from fedclust.federation.backend import Backend, InProcess
from fedclust.federation.batches import shuffled_batches
from fedclust.federation.client import ClientModule, action
from fedclust.federation.context import ClientContext
from fedclust.federation.errors import ClientError, NonFiniteLossError
from fedclust.federation.message import Message, read_int, tensors_under, with_prefix
from fedclust.federation.padding import mask_of, mean_squared_error
from fedclust.federation.vectorised import Vectorised
from lightning_modules.classifier import Classifier
from lightning_modules.dcn import DCN

SIZES = (30, 4, 9, 17, 52)  # batches of 8: ragged ends, one batch only, many steps
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "Adam": partial(torch.optim.Adam, lr=0.01, eps=1e-3),
    "Adam fused": partial(torch.optim.Adam, lr=0.01, eps=1e-3, amsgrad=True, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.003, eps=1e-3, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02, eps=1e-3, initial_accumulator_value=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5, eps=1e-3),
}
BODIES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 6)),
    "cumulative BatchNorm": lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None, affine=False), nn.Linear(6, 6)),
    "image BatchNorm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 6)
    ),
    "GroupNorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 6)),
}


class Net(ClientModule):
    """Learns to reproduce its rows; every way to go wrong is an argument of its action."""

    draws_in_training = False
    honours_row_masks = True

    def __init__(self, body: str = "plain", optimizer: str = "SGD", clip: float | None = None) -> None:
        super().__init__()
        self.net, self.optimizer, self.max_grad_norm = BODIES[body](), optimizer, clip
        self.scale = 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def terms(self, batch: Any, factor: float = 1.0) -> dict[str, Tensor]:
        error = mean_squared_error(self.net(batch["x"]), batch["x"], mask_of(batch, "x"))
        return {"loss": factor * self.scale * error, "error": error}

    @action
    def learn(self, message: Message, ctx: ClientContext) -> Message:
        self.load_exchanged(tensors_under("weights", message))
        x, rng = ctx.data.train.x, ctx.rng("batches")
        if message.get("poison") == ctx.id:
            x = x * math.inf
        if "scales" in message:
            self.scale = float(torch.as_tensor(message["scales"])[ctx.id])

        def batches(epoch: int) -> Any:
            for rows in shuffled_batches(len(x), 8, rng):
                yield {"x": x[rows]}
                if message.get("fail") == ctx.id and epoch == 1:
                    raise OSError("disk full")

        factor = 2.0 + (ctx.id if message.get("own_factor") else 0)
        loss: Any = (lambda b: self.terms(b)) if message.get("anonymous") else partial(self.terms, factor=factor)
        epochs = torch.as_tensor(message["epochs"]).expand(len(SIZES))[ctx.id]
        fit = self.fit_locally(ctx, int(epochs), batches=batches, loss=loss)
        return {"n_steps": fit.n_steps, **with_prefix("term", dict(fit.terms)), **with_prefix("w", self.snapshot())}


@pytest.fixture
def connect(blobs: Any) -> Callable[..., Backend]:
    def make(backend: Backend, module: ClientModule, sizes: tuple[int, ...] = SIZES, **options: Any) -> Backend:
        data = blobs(sizes, val_fraction=0.0, test_fraction=0.0)
        module.build(data.input_shape, data.n_classes)
        module.initialize(0)
        settings = {"seed": 0, "device": torch.device("cpu"), "precision": "32-true", **options}
        backend.connect(module, data, **settings)
        backend.round = 1
        return backend

    return make


def ask(backend: Backend, **message: Any) -> dict[int, Message]:
    shared = {**with_prefix("weights", backend.module.snapshot()), "epochs": 3, **message}
    return backend.ask("learn", {client: {} for client in range(backend.data.n_clients)}, shared=shared)


def assert_close(ours: dict[int, Message], theirs: dict[int, Message], atol: float = 1e-5, without: str = " ") -> None:
    assert ours.keys() == theirs.keys()
    for client, reply in theirs.items():
        assert ours[client].keys() == reply.keys()
        for name, value in reply.items():
            if without not in name:
                found, expected = torch.as_tensor(ours[client][name]), torch.as_tensor(value)
                assert found.dtype == expected.dtype
                assert torch.allclose(found.double(), expected.double(), rtol=0, atol=atol), (client, name)


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
    scales = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    assert_close(
        ask(connect(Vectorised(), Net(clip=clip)), scales=scales),
        ask(connect(InProcess(), Net(clip=clip)), scales=scales),
    )


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
    moved = [not torch.equal(expected[c]["w/net.0.weight"], unclipped[c]["w/net.0.weight"]) for c in expected]
    assert True in moved


# -- padding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [body for body in BODIES if body != "plain"])
def test_what_is_in_padded_rows_changes_no_bit(connect: Any, monkeypatch: Any, body: str) -> None:
    expected = ask(connect(Vectorised(), Net(body)))
    padded: list[int] = []

    def other(rows: Tensor, length: int) -> Tensor:
        padded.append(length - len(rows))
        return torch.cat([rows, torch.full((length - len(rows), *rows.shape[1:]), 7.0)])

    monkeypatch.setattr(padding, "pad_rows", other)
    found = ask(connect(Vectorised(), Net(body)))
    assert max(padded) > 2
    assert_close(found, expected, atol=0.0)


def test_losses_and_norms_without_masks_would_be_found_out(connect: Any, monkeypatch: Any) -> None:
    """The equality above is not for lack of padding: taking padded rows as real ones gives other numbers."""
    expected = ask(connect(InProcess(), Net("BatchNorm")))
    for name, broken in (
        ("test loss", lambda: monkeypatch.setitem(globals(), "mask_of", lambda batch, name: None)),
        ("norm", lambda: monkeypatch.setattr("fedclust.federation.masked_norm.normalise", _all_rows)),
    ):
        broken()
        found = ask(connect(Vectorised(), Net("BatchNorm")))
        monkeypatch.undo()
        with pytest.raises(AssertionError):
            assert_close(found, expected)
        assert name


def _all_rows(layer: Any, x: Tensor, mask: Tensor) -> Tensor:
    return type(layer).forward(layer, x)


def test_masked_means_by_hand() -> None:
    values, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0], [100.0, 100.0]]), torch.tensor([1.0, 1.0, 0.0])
    assert float(padding.mean_over_rows(values, mask)) == 4.0
    assert float(padding.mean_over_rows(values[:, 0], mask)) == 3.0
    assert float(mean_squared_error(values, torch.zeros(3, 2), mask)) == (1 + 9 + 25 + 49) / 4
    logits, labels = torch.tensor([[0.0, 0.0], [0.0, math.log(3)], [9.0, 0.0]]), torch.tensor([0, 1, 1])
    expected = (math.log(2) + math.log(4 / 3)) / 2
    assert float(padding.mean_cross_entropy(logits, labels, mask)) == pytest.approx(expected)


def test_entries_with_other_numbers_of_rows_get_lengths_of_their_own() -> None:
    batches = [{"x": torch.ones(4, 2), "z": torch.ones(2), "w": torch.ones(4)},
               {"x": torch.ones(3, 2), "z": torch.ones(4), "w": torch.ones(3)}]  # fmt: skip
    stacked, counts = padding.stack_batches(batches, ["client 0", "client 1"])
    assert {name: tuple(value.shape) for name, value in stacked.items()} == {
        "x": (2, 4, 2), "mask/x": (2, 4), "z": (2, 5), "mask/z": (2, 5), "w": (2, 4), "mask/w": (2, 4)
    }  # fmt: skip
    assert stacked["mask/z"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    assert counts == {4: (4, 3), 5: (2, 4)}


@pytest.mark.parametrize(
    ("other", "text"),
    [({"y": torch.ones(3, 2)}, r"client 0 has \['x'\], client 1 has \['y'\]"),
     ({"x": torch.ones(3, 5)}, r"'x'.*client 1 has torch.float32 \(3, 5\)"),
     ({"x": torch.ones(3, 2, dtype=torch.int64)}, r"'x'.*client 1 has torch.int64")],
)  # fmt: skip
def test_batches_that_do_not_fit_are_refused_by_name(other: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        padding.stack_batches([{"x": torch.ones(3, 2)}, other], ["client 0", "client 1"])


def test_a_module_must_declare_that_it_honours_masks(connect: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Net, "honours_row_masks", False)
    with pytest.raises(ClientError, match=r"client 0.*Net does not declare honours_row_masks = True"):
        ask(connect(Vectorised(), Net()))
    assert_close(
        ask(connect(Vectorised(), Net(), (8, 16, 24, 8, 8))), ask(connect(InProcess(), Net(), (8, 16, 24, 8, 8)))
    )


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [{"poison": 2}, {"fail": 2}])
def test_a_failing_client_fails_alone_and_by_name(connect: Any, trouble: dict[str, int]) -> None:
    found, expected = (
        connect(kind(on_failure="skip"), Net("BatchNorm")) for kind in (Vectorised, InProcess)
    )  # fmt: skip
    ours, theirs = ask(found, **trouble), ask(expected, **trouble)
    assert list(ours) == [0, 1, 3, 4]
    assert_close(ours, theirs)
    assert [str(failure) for failure in found.failures] == [str(failure) for failure in expected.failures]
    with pytest.raises(ClientError, match="client 2, round 1, action 'learn'") as caught:
        ask(connect(Vectorised(), Net("BatchNorm")), **trouble)
    assert isinstance(caught.value.__cause__, NonFiniteLossError if "poison" in trouble else OSError)


def test_batch_norm_of_a_single_row_fails_for_its_client_only(connect: Any) -> None:
    sizes = (30, 1, 9)
    backend = connect(Vectorised(on_failure="skip"), Net("BatchNorm"), sizes)
    expected = connect(InProcess(on_failure="skip"), Net("BatchNorm"), sizes)
    assert_close(ask(backend), ask(expected))
    assert [failure.client for failure in backend.failures] == [1] == [f.client for f in expected.failures]
    assert "BatchNorm needs more than one value per channel" in str(backend.failures[0])
    # Elsewhere a client of one row is one like any other.
    for body in ("plain", "image BatchNorm", "GroupNorm"):
        assert_close(ask(connect(Vectorised(), Net(body), sizes)), ask(connect(InProcess(), Net(body), sizes)))


@pytest.mark.parametrize(
    ("message", "text"),
    [({"anonymous": True}, r"client 0.*the loss of Net must be a method of the module.*lambda"),
     ({"own_factor": True}, r"client 0 and client 1 cannot train together: the arguments of their loss differ"),
     ({"scales": torch.arange(5)}, r"client 0 and client 1.*set Net\.scale to different values")],
)  # fmt: skip
def test_what_cannot_be_trained_together_is_refused_by_name(connect: Any, message: Any, text: str) -> None:
    with pytest.raises(ClientError, match=text):
        ask(connect(Vectorised(), Net()), **message)
    ask(connect(InProcess(), Net()), **message)


class Sorting(nn.Module):
    """A layer whose shape depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x


def test_a_layer_that_cannot_be_vectorised_is_named(connect: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(BODIES, "plain", lambda: nn.Sequential(nn.Linear(6, 6), Sorting()))
    with pytest.raises(ClientError, match=r"Net, layer 'net\.1' \(Sorting\), cannot be trained for several clients"):
        ask(connect(Vectorised(), Net()))


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Rprop])
def test_other_optimisers_are_refused_before_training(connect: Any, monkeypatch: Any, kind: Any) -> None:
    monkeypatch.setitem(OPTIMIZERS, "SGD", kind)
    with pytest.raises(ValueError, match=rf"Vectorised cannot train Net: optimiser {kind.__name__}.*element-wise SGD"):
        connect(Vectorised(), Net())


def test_modules_that_draw_and_precisions_with_loss_scales_are_refused(connect: Any, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match=r"16-mixed.*loss scale per client"):
        connect(Vectorised(), Net(), precision="16-mixed")
    monkeypatch.setattr(Net, "draws_in_training", True)
    with pytest.raises(ValueError, match=r"cannot train Net: draws_in_training is not set to False"):
        connect(Vectorised(), Net())
    monkeypatch.setitem(BODIES, "plain", lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)))
    with pytest.raises(ValueError, match=r"cannot train Net: layers \['net\.1'\] draw"):
        connect(Vectorised(), Net())


@pytest.mark.parametrize("value", [0, 1.5, True])
def test_bad_numbers_of_clients_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="clients_per_batch"):
        Vectorised(value)


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
    from fedclust.data.datamodule import FederatedDataModule

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
