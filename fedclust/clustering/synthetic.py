"""What a FedDCN client tells about its clusters, and the synthetic latents that a server draws from it (Sec. III-A)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedclust.clustering.checks import as_rows

_ROUNDING = 1e-6  # relative rounding of a float32 centre: a lone point counts as sitting on its centre


def cluster_spread(
    z: Tensor, labels: Tensor, centers: Tensor, kind: Literal["isotropic", "diagonal"] = "isotropic"
) -> Tensor:
    """Spread of each cluster, as a population standard deviation; 0 for an empty cluster or a single point.

    Args:
        z: (n, d) latents.
        labels: (n,) cluster of each row.
        centers: (K, d).
        kind: ``"isotropic"``: standard deviation of the distances between the centre and its points;
            ``"diagonal"``: standard deviation of each coordinate of the points.

    Returns:
        (K,) for ``"isotropic"``, (K, d) for ``"diagonal"``; in the units of z, never NaN.

    Raises:
        ValueError: for shapes that do not fit, labels out of range, non-finite values or an unknown kind.
    """
    _one_of(kind, "kind", ("isotropic", "diagonal"))
    z, labels, centers = _check(z, labels, centers)
    wide = z.to(torch.float64)
    values = wide if kind == "diagonal" else _distances(wide, labels, centers)[:, None]
    counts = torch.bincount(labels, minlength=len(centers)).clamp(min=1).to(torch.float64)[:, None]
    means = torch.zeros(len(centers), values.shape[1], dtype=torch.float64, device=z.device)
    means = means.index_add(0, labels, values) / counts
    squares = torch.zeros_like(means).index_add(0, labels, (values - means[labels]).square()) / counts
    spread = squares.sqrt().to(z.dtype)
    return spread if kind == "diagonal" else spread[:, 0]


def count_points(
    z: Tensor,
    labels: Tensor,
    centers: Tensor,
    spread: Tensor,
    rule: Literal["within_sigma", "assigned"] = "within_sigma",
) -> Tensor:
    """Number of points that speak for each cluster, (K,) int64.

    Args:
        z: (n, d) latents.
        labels: (n,) cluster of each row.
        centers: (K, d).
        spread: (K,) isotropic spread of :func:`cluster_spread`; needed for both rules, used by ``"within_sigma"``.
        rule: ``"within_sigma"``: the cluster's points at a distance of at most one spread from the centre (up to the
            rounding of a float32 centre, so that a single point counts); ``"assigned"``: all points of the cluster.

    Raises:
        ValueError: as :func:`cluster_spread`, or if ``spread`` is not (K,), finite and non-negative.
    """
    _one_of(rule, "rule", ("within_sigma", "assigned"))
    z, labels, centers = _check(z, labels, centers)
    if tuple(spread.shape) != (len(centers),):
        raise ValueError(
            f"spread must be the isotropic one of shape ({len(centers)},), got {tuple(spread.shape)}; "
            "a spread per coordinate says nothing about a distance"
        )
    _check_spread(spread)
    if rule == "assigned":
        return torch.bincount(labels, minlength=len(centers))
    distance = _distances(z.to(torch.float64), labels, centers)
    slack = _ROUNDING * (1 + centers.to(torch.float64).norm(dim=1))
    within = distance <= (spread.to(device=z.device, dtype=torch.float64) + slack)[labels]
    return torch.bincount(labels[within], minlength=len(centers))


def sample_latents(
    centers: Tensor,
    spread: Tensor,
    counts: Sequence[int] | np.ndarray | Tensor,
    *,
    covariance: Literal["sigma_squared", "sigma"] = "sigma_squared",
    generator: torch.Generator,
) -> Tensor:
    """Draw normal latents around each centre.

    Args:
        centers: (K, d).
        spread: (K,) or, one value per coordinate, (K, d); at least 0.
        counts: (K,) rows to draw from each cluster.
        covariance: ``"sigma_squared"``: the spread is the standard deviation of every coordinate, covariance
            sigma^2 I, as the authors' implementation has it; ``"sigma"``: covariance sigma I, as the paper prints it.
        generator: source of the draws; they are made on its device and moved to that of the centres.

    Returns:
        (sum of counts, d) in the type of ``centers``, ordered by cluster.

    Raises:
        ValueError: for shapes that do not fit, bad spreads, negative counts or an unknown covariance.
    """
    _one_of(covariance, "covariance", ("sigma_squared", "sigma"))
    centers = as_rows(centers, "centers")
    if tuple(spread.shape) not in {(len(centers),), tuple(centers.shape)}:
        raise ValueError(
            f"spread must have shape ({len(centers)},) or {tuple(centers.shape)}, got {tuple(spread.shape)}"
        )
    _check_spread(spread)
    repeats = torch.as_tensor(counts)
    if tuple(repeats.shape) != (len(centers),) or repeats.is_floating_point() or bool((repeats < 0).any()):
        raise ValueError(f"counts must be {len(centers)} integers of at least 0, got {repeats.tolist()}")
    scale = spread.to(centers) if covariance == "sigma_squared" else spread.to(centers).sqrt()
    scale = scale if scale.ndim == 2 else scale[:, None].expand_as(centers)
    owner = torch.repeat_interleave(torch.arange(len(centers)), repeats.cpu()).to(centers.device)
    noise = torch.randn(len(owner), centers.shape[1], generator=generator, device=generator.device, dtype=centers.dtype)
    return centers[owner] + scale[owner] * noise.to(centers.device)


def _distances(z: Tensor, labels: Tensor, centers: Tensor) -> Tensor:
    return (z - centers.to(torch.float64)[labels]).square().sum(dim=1).sqrt()


def _check(z: Tensor, labels: Tensor, centers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    z, centers = as_rows(z, "z"), as_rows(centers, "centers")
    labels = torch.as_tensor(labels, device=z.device)
    if z.shape[1] != centers.shape[1]:
        raise ValueError(f"z has {z.shape[1]} columns and centers have {centers.shape[1]}")
    if tuple(labels.shape) != (len(z),) or labels.is_floating_point():
        raise ValueError(f"labels must be {len(z)} integers, got shape {tuple(labels.shape)} of {labels.dtype}")
    labels = labels.to(torch.int64)
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(centers):
        raise ValueError(f"labels must lie in 0..{len(centers) - 1}, got {int(labels.min())}..{int(labels.max())}")
    return z, labels, centers.to(z.device)


def _check_spread(spread: Tensor) -> None:
    if not bool(torch.isfinite(spread).all()) or bool((spread < 0).any()):
        raise ValueError(f"spread must be finite and at least 0, got {spread.tolist()}")


def _one_of(value: Any, name: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
