"""Settings of Algorithm 1 of the FedDCN paper: epochs, loss weights, geometry; and how a message carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedclust.checks import non_negative
from fedclust.federation.message import Value, read_int, read_number


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
            non_negative(f"loss weight {name!r}", getattr(self, name))
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


def plan_of(message: Mapping[str, Value]) -> LocalPlan:
    """Reads Algorithm 1's settings from a message."""
    return LocalPlan(
        weights_of(message),
        pretrain_epochs=read_int(message, "pretrain_epochs"),
        cluster_epochs=read_int(message, "cluster_epochs"),
        n_neighbors=read_int(message, "n_neighbors"),
        min_dist=read_number(message, "min_dist"),
    )


def weights_of(message: Mapping[str, Value]) -> LossWeights:
    """Reads the loss weights from a message."""
    return LossWeights(
        read_number(message, "recon_weight"),
        read_number(message, "cluster_weight"),
        read_number(message, "geometry_weight"),
    )
