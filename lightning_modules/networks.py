"""Networks of the client modules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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
