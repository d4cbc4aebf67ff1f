"""Settings of Algorithm 1 of the FedDCN paper: epochs, loss weights, geometry; and how a message carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class LossWeights:
    """Weights of the three terms, L = α·recon + λ·clust + β·geom (FedDCN paper, Eq. 2).

    A term with weight 0 is not computed.
    """

    recon: float = 1.0
    clust: float = 0.0
    geom: float = 0.0

    def __post_init__(self) -> None:
        for name in ("recon", "clust", "geom"):
            value = getattr(self, name)
            if not isfinite(value) or value < 0:
                raise ValueError(f"loss weight {name!r} must be finite and at least 0, not {value}")
        if self.recon == self.clust == self.geom == 0:
            raise ValueError("all loss weights are 0: nothing would be learnt")


@dataclass(frozen=True)
class LocalPlan:
    """Settings of Algorithm 1: epochs of both phases, loss weights and UMAP's parameters."""

    weights: LossWeights
    pretrain_epochs: int
    cluster_epochs: int
    n_neighbors: int = 15
    min_dist: float = 0.1


def plan_of(message: Mapping[str, object]) -> LocalPlan:
    """Reads Algorithm 1's settings from a message."""
    return LocalPlan(
        weights_of(message),
        pretrain_epochs=_int(message, "pretrain_epochs"),
        cluster_epochs=_int(message, "cluster_epochs"),
        n_neighbors=_int(message, "n_neighbors"),
        min_dist=_float(message, "min_dist"),
    )


def weights_of(message: Mapping[str, object]) -> LossWeights:
    """Reads the loss weights from a message."""
    return LossWeights(
        _float(message, "recon_weight"), _float(message, "cluster_weight"), _float(message, "geometry_weight")
    )


def _int(message: Mapping[str, object], name: str) -> int:
    value = message[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name!r} must be an integer, not {value!r}")
    return value


def _float(message: Mapping[str, object], name: str) -> float:
    value = message[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name!r} must be a number, not {value!r}")
    return float(value)
