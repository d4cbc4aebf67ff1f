"""Mixtures whose M-step needs sums only, so that it works on vectors that nobody may read (FLAMECHE, Sec. 3.2).

A client holds metadata φ (C, d), one block per class, and knows which blocks it observed. It contributes a vector of
sufficient statistics; parameters are functions of sums of such vectors. Assignments are hard, as in the paper's
spherical instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_SMALLEST = 1e-12


@dataclass(frozen=True)
class Metadata:
    """A client's description of its rows.

    Attributes:
        blocks: (C, d) float32, class-wise means; 0 where the client lacks the class.
        counts: (C,) int64, rows of each class.
    """

    blocks: Tensor
    counts: Tensor

    @property
    def observed(self) -> Tensor:
        """(C,) bool: which classes the client has."""
        return self.counts > 0


class Mixture(ABC):
    """One kind of component, for K components and any number of independent starts at once.

    Shapes: S starts, K components, C classes, d features. Parameters are one tensor (S, K, C, p).
    """

    name: ClassVar[str]
    needs_overall: ClassVar[bool] = True

    @abstractmethod
    def statistics(self, metadata: Metadata) -> Tensor:
        """What one client contributes to its component's sums, (C, s) float64."""

    @abstractmethod
    def parameters(self, sums: Tensor, members: Tensor, before: Tensor) -> Tensor:
        """M-step.

        Args:
            sums: (S, K, C, s) float64, of the members' statistics.
            members: (S, K) int64 number of members.
            before: (S, K, C, p) parameters so far, kept where nobody contributes.
        """

    @abstractmethod
    def costs(self, metadata: Metadata, parameters: Tensor) -> Tensor:
        """E-step: (S, K) float64, how badly each component fits the client; the smallest wins."""

    @abstractmethod
    def start(self, starts: int, components: int, overall: Tensor, clients: int, generator: torch.Generator) -> Tensor:
        """First parameters (S, K, C, p).

        Args:
            starts: S.
            components: K.
            overall: (C, s) sums of the statistics of the clients of the first round.
            clients: Their number.
            generator: For the draws.
        """

    def sums(self, statistics: Tensor, slots: Tensor, components: int) -> Tensor:
        """Sums (S, K, C, s) of the clients' statistics (N, C, s) by their slots (S, N); slot −1 counts nowhere."""
        shares = (slots[:, None, :] == torch.arange(components)[None, :, None]).double()
        return torch.einsum("skn,ncp->skcp", shares, statistics)


class Spherical(Mixture):
    """Spherical k-means (Sec. 3.4): cosine dissimilarity to centroids, over the classes that the client has.

    Statistics are φ and an indicator per class, so that a centroid's block is the mean over the members that have the
    class.
    """

    name = "spherical"
    needs_overall = False

    def statistics(self, metadata: Metadata) -> Tensor:
        """φ beside one indicator, (C, d + 1)."""
        return torch.cat([metadata.blocks.double(), metadata.observed.double()[:, None]], dim=1)

    def parameters(self, sums: Tensor, members: Tensor, before: Tensor) -> Tensor:
        """Means of the observed blocks."""
        count = sums[..., -1:].round()  # of an encrypted sum, which is exact up to a small error only
        return torch.where(count > 0, sums[..., :-1] / count.clamp(min=1), before)

    def costs(self, metadata: Metadata, parameters: Tensor) -> Tensor:
        """1 − cosine over the concatenation of the observed blocks; 1 for vectors of length 0."""
        own = metadata.blocks.double()[metadata.observed].flatten()
        centers = parameters[:, :, metadata.observed].flatten(2)
        lengths = (own.norm() * centers.norm(dim=2)).clamp(min=_SMALLEST)
        return 1 - (centers @ own) / lengths

    def start(self, starts: int, components: int, overall: Tensor, clients: int, generator: torch.Generator) -> Tensor:
        """|standard normal|, of length 1: features after a ReLU are not negative [ours]."""
        classes, width = overall.shape[0], overall.shape[1] - 1
        drawn = torch.randn(starts, components, classes, width, generator=generator, dtype=torch.float64).abs()
        return drawn / drawn.flatten(2).norm(dim=2)[:, :, None, None]


class DiagonalGaussian(Mixture):
    """Gaussians with a variance per coordinate, over the classes that the client has [ours].

    Statistics are φ, φ² and an indicator per class. Variances have a floor, a hundredth of the first round's.
    """

    name = "gaussian"

    def statistics(self, metadata: Metadata) -> Tensor:
        """φ, φ² and one indicator, (C, 2d + 1)."""
        blocks = metadata.blocks.double()
        return torch.cat([blocks, blocks.square(), metadata.observed.double()[:, None]], dim=1)

    def parameters(self, sums: Tensor, members: Tensor, before: Tensor) -> Tensor:
        """Means, variances and the floor of the variances, (…, 3d)."""
        width = before.shape[-1] // 3
        count = sums[..., -1:].round()
        means = sums[..., :width] / count.clamp(min=1)
        floor = before[..., 2 * width :]
        variances = torch.maximum(sums[..., width : 2 * width] / count.clamp(min=1) - means.square(), floor)
        return torch.where(count > 0, torch.cat([means, variances, floor], dim=-1), before)

    def costs(self, metadata: Metadata, parameters: Tensor) -> Tensor:
        """Mean negative log-density per observed coordinate."""
        width = parameters.shape[-1] // 3
        own = metadata.blocks.double()[metadata.observed]
        seen = parameters[:, :, metadata.observed]
        means, variances = seen[..., :width], seen[..., width : 2 * width]
        return ((own - means).square() / variances + variances.log()).flatten(2).mean(2) / 2

    def start(self, starts: int, components: int, overall: Tensor, clients: int, generator: torch.Generator) -> Tensor:
        """The first round's means, moved by draws of its standard deviations, and its variances."""
        width = (overall.shape[1] - 1) // 2
        count = overall[:, -1:].clamp(min=1)
        means = overall[:, :width] / count
        variances = (overall[:, width : 2 * width] / count - means.square()).clamp(min=0)
        variances = variances + variances.mean().clamp(min=_SMALLEST) * 1e-3
        shape = (starts, components, *means.shape)
        moved = means + variances.sqrt() * torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.cat([moved, variances.expand(shape), (variances / 100).expand(shape)], dim=-1)


class Multinomial(Mixture):
    """Class proportions: groups clients by how many rows of each class they have, not by features [ours]."""

    name = "multinomial"

    def statistics(self, metadata: Metadata) -> Tensor:
        """Rows per class, (C, 1)."""
        return metadata.counts.double()[:, None]

    def parameters(self, sums: Tensor, members: Tensor, before: Tensor) -> Tensor:
        """Proportions, with half a row more in every class."""
        smooth = sums + 0.5
        return torch.where(members[:, :, None, None] > 0, smooth / smooth.sum(2, keepdim=True), before)

    def costs(self, metadata: Metadata, parameters: Tensor) -> Tensor:
        """Negative log-likelihood per row."""
        counts = metadata.counts.double()
        return -(parameters[..., 0].log() @ counts) / counts.sum()

    def start(self, starts: int, components: int, overall: Tensor, clients: int, generator: torch.Generator) -> Tensor:
        """The first round's proportions, each multiplied by a log-normal draw."""
        smooth = overall + 0.5
        shape = (starts, components, *smooth.shape)
        drawn = smooth * torch.randn(shape, generator=generator, dtype=torch.float64).exp()
        return drawn / drawn.sum(2, keepdim=True)


MIXTURES: dict[str, Mixture] = {mixture.name: mixture for mixture in (Spherical(), DiagonalGaussian(), Multinomial())}


def spread_slots(slots: Tensor, errors: Tensor, components: int, generator: torch.Generator) -> Tensor | None:
    """Re-clustering of one start (Sec. 3.4): the worst cluster's clients draw among it and the empty clusters.

    Args:
        slots: (N,) int64 latest assignments, −1 for a client that was never seen.
        errors: (N,) float64 latest errors.
        components: K.
        generator: For the draws.

    Returns:
        (N,) new assignments; None if no cluster is empty, or nobody was seen.
    """
    counts = torch.bincount(slots[slots >= 0], minlength=components)
    empty = torch.nonzero(counts == 0).flatten()
    if not len(empty) or len(empty) == components:
        return None
    sums = torch.zeros(components, dtype=torch.float64).index_add_(0, slots[slots >= 0], errors[slots >= 0])
    means = torch.where(counts > 0, sums / counts.clamp(min=1), -torch.inf)
    worst = int(means.argmax())
    choices = torch.cat([torch.tensor([worst]), empty])
    members = torch.nonzero(slots == worst).flatten()
    drawn = torch.randint(len(choices), (len(members),), generator=generator)
    changed = slots.clone()
    changed[members] = choices[drawn]
    return changed
