"""Networks of the client modules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import nn

Normalization = Literal["batch", "group", "none"]
_GROUPS = 8
_SMALLEST_GROUP = 8  # normalising a group of one or two values would leave nothing but their order


class UnitInterval(nn.Module):
    """Sigmoid in float32, so that outputs near 0 and 1 keep their precision under mixed precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps any real tensor into [0, 1], float32."""
        return torch.sigmoid(x.float())


def _norm(width: int, kind: Normalization) -> list[nn.Module]:
    if kind == "batch":
        return [nn.BatchNorm1d(width)]
    if kind == "group":
        groups = next(n for n in range(_GROUPS, 0, -1) if n == 1 or (width % n == 0 and width // n >= _SMALLEST_GROUP))
        return [nn.GroupNorm(groups, width)]
    return []


def _hidden(widths: Sequence[int], kind: Normalization) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), *_norm(after, kind), nn.ReLU()]
    return layers


def mlp_encoder(
    input_dim: int, hidden_dims: Sequence[int], latent_dim: int, normalization: Normalization = "batch"
) -> nn.Sequential:
    """Hidden layers of Linear, normalisation and ReLU, then a plain Linear bottleneck.

    Shapes: (n, input_dim) → (n, latent_dim).
    """
    layers = _hidden([input_dim, *hidden_dims], normalization)
    return nn.Sequential(*layers, nn.Linear(hidden_dims[-1], latent_dim))


def mlp_decoder(
    input_dim: int,
    hidden_dims: Sequence[int],
    latent_dim: int,
    normalization: Normalization = "batch",
    output: Literal["sigmoid", "linear"] = "sigmoid",
) -> nn.Sequential:
    """The mirror of `mlp_encoder`; the last layer is followed by a Sigmoid or by nothing.

    Shapes: (n, latent_dim) → (n, input_dim).
    """
    layers = _hidden([latent_dim, *reversed(hidden_dims)], normalization)
    layers.append(nn.Linear(hidden_dims[0], input_dim))
    if output == "sigmoid":
        layers.append(UnitInterval())
    return nn.Sequential(*layers)


# Pooling stands before its ReLU: the values and gradients are the same bits, and the ReLU has a quarter of the work.
def image_cnn(input_shape: tuple[int, ...], n_classes: int) -> nn.Sequential:
    """Two 5×5 convolutions (32, 64) with pooling and no padding, then Linear to 512 and to the classes.

    582,026 parameters for 1×28×28 images and 10 classes (PA-CFL paper, Sec. 7).

    Raises:
        ValueError: If the rows are no images, or smaller than 16×16.
    """
    channels, height, width = _image(input_shape, least=16)
    features = 64 * _after_cnn(height) * _after_cnn(width)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, n_classes),
    )  # fmt: skip


def lenet5(input_shape: tuple[int, ...], n_classes: int) -> nn.Sequential:
    """LeNet-5 with ReLU and max pooling: convolutions of 6 (padded) and 16, then Linear to 120, 84 and the classes.

    61,706 parameters for 1×28×28 images and 10 classes.

    Raises:
        ValueError: If the rows are no images, or smaller than 12×12.
    """
    channels, height, width = _image(input_shape, least=12)
    features = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(features, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, n_classes),
    )  # fmt: skip


def small_cnn(input_shape: tuple[int, ...], n_classes: int) -> nn.Sequential:
    """Two padded 3×3 convolutions (16, 32), one pooling, Linear to 84 and to the classes; for 8×8 digits.

    Raises:
        ValueError: If the rows are no images, or smaller than 4×4.
    """
    channels, height, width = _image(input_shape, least=4)
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * (height // 2) * (width // 2), 84), nn.ReLU(), nn.Linear(84, n_classes),
    )  # fmt: skip


def resnet10(input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
    """ResNet of torchvision with four single BasicBlocks with its 7×7 stem; 4,910,922 parameters for RGB, 10 classes.

    Raises:
        ValueError: If the rows are no images of three channels.
    """
    from torchvision.models.resnet import BasicBlock, ResNet

    channels, _, _ = _image(input_shape, least=16)
    if channels != 3:
        raise ValueError(f"resnet10 needs images of 3 channels, the data has rows of shape {input_shape}")
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=n_classes)


def mlp(input_shape: tuple[int, ...], n_classes: int) -> nn.Sequential:
    """Flatten, Linear to 128, ReLU, Linear to the classes; for rows that are no images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 128), nn.ReLU(), nn.Linear(128, n_classes))


def linear(input_shape: tuple[int, ...], n_classes: int) -> nn.Sequential:
    """Flatten, one Linear to the classes; for features of a frozen encoder."""
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), n_classes))


def _image(input_shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"this network needs images (channels, height, width) of at least {least}×{least}, the data has rows of "
            f"shape {input_shape}; small_cnn takes images from 4×4 on, mlp and linear take any rows"
        )
    channels, height, width = input_shape
    return channels, height, width


def _after_cnn(length: int) -> int:
    return ((length - 4) // 2 - 4) // 2
