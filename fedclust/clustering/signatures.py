"""Class-wise signatures of clients and the distances between them (FMCL, arXiv 2604.27510)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclust.checks import positive, real_number
from fedclust.clustering.checks import as_rows, prefix

NO_OVERLAP = 1.0
# Means come in float32, of features that are float32 too and can differ in their last bits with the batch they were
# computed in: relative to its length a mean is known to 1e-6, after centring relative to what was taken off.
_PRECISION = 1e-6
_DECIMALS = 12


@dataclass(frozen=True)
class Signature:
    """What a client tells of its data.

    Attributes:
        classes: (C,) int64, the classes that the client holds, ascending.
        means: (C, d) float, mean embedding of each of them.
        weights: (C,) float64, share of each of them in the client's rows; they sum to 1.
    """

    classes: Tensor
    means: Tensor
    weights: Tensor


@dataclass(frozen=True)
class SignatureDistances:
    """Outcome of `signature_distances`.

    Attributes:
        distances: (N, N) float64, symmetric, exactly 0 on the diagonal.
        overlaps: (N, N) float64, Ω: what two clients share of their classes; 1 on the diagonal.
        far: The distance of pairs that share no class; None where every pair shares one.
        reason: Why `far` is a constant, if no pair shares a class.
    """

    distances: NDArray[np.float64]
    overlaps: NDArray[np.float64]
    far: float | None
    reason: str | None = None


def signature(features: Any, labels: Any, who: str = "") -> Signature:
    """Mean embedding and share of every class that a client holds.

    Args:
        features: (n, d) floats, the embeddings of the client's rows.
        labels: (n,) int64 class indices.
        who: Start of the error messages, such as "client 3".

    Raises:
        ValueError: Naming ``who``: without rows, for labels that are not one per row, or values that are not finite.
    """
    rows = as_rows(features, "features", who)
    classes = torch.as_tensor(labels)
    if not len(rows):
        raise ValueError(f"{prefix(who)}a client without rows has no signature")
    if classes.shape != (len(rows),) or classes.is_floating_point():
        raise ValueError(
            f"{prefix(who)}labels must be {len(rows)} class indices, got {classes.dtype} {tuple(classes.shape)}"
        )
    found, position, counts = torch.unique(classes, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(found), rows.shape[1], dtype=torch.float64).index_add_(0, position, rows.double())
    return Signature(found, (sums / counts[:, None]).to(rows.dtype), counts.double() / len(rows))


def signature_distances(
    signatures: Sequence[Signature],
    *,
    center: bool | Any = True,
    overlap_scaling: bool = True,
    far_factor: float = 2.0,
    far_percentile: float = 99.0,
) -> SignatureDistances:
    """Distances between clients over the classes that they share.

    With m_c = min(w_ic, w_jc) and Ω = Σ m_c: d_ij = Σ m_c (1 − cos(μ_ic, μ_jc)) / Ω / Ω. Means in float32 are known to
    a millionth of their length before centring: directions that differ by no more than that makes of them are equal,
    and a centred mean that is no longer counts as 0. It has cosine 0 with all others but 1 with another 0. So the
    distance of equal signatures is exactly 0, those of the same rows in another order too.

    The paper leaves open how far apart clients without a common class are; here it is the larger of the largest
    distance observed and ``far_factor`` times the ``far_percentile``-th percentile. Where nothing positive was
    observed, it is the constant 1.

    Args:
        signatures: One per client.
        center: True takes the clients' mean signature off all means first, since raw class means share one direction;
            a public constant (d,) is taken off instead; False takes nothing off.
        overlap_scaling: Whether to divide by Ω once more; False is the paper's ablation.
        far_factor: At least 1.
        far_percentile: In (0, 100].

    Raises:
        ValueError: For arguments out of range, or signatures of different widths.
    """
    check_far(far_factor, far_percentile)
    means, weights = _dense(signatures)
    directions, noise = _directions(means, weights, center)
    shared = np.zeros((len(weights), len(weights)))
    dissimilar = np.zeros_like(shared)
    for column in range(weights.shape[1]):
        common = np.minimum(weights[:, None, column], weights[None, :, column])
        apart = 1 - np.clip(directions[:, column] @ directions[:, column].T, -1, 1)
        angles = noise[:, None, column] + noise[None, :, column]
        shared += common
        dissimilar += common * np.where(apart <= angles**2 / 2, 0.0, apart)
    with np.errstate(invalid="ignore", divide="ignore"):
        distances = dissimilar / shared
        if overlap_scaling:
            distances = distances / shared
    distances = np.triu(distances.round(_DECIMALS), 1)
    distances = distances + distances.T
    overlaps = (shared + shared.T) / 2
    np.fill_diagonal(overlaps, 1.0)
    return _with_far(distances, overlaps, far_factor, far_percentile)


def check_far(factor: float, percentile: float) -> tuple[float, float]:
    """Both as floats.

    Raises:
        ValueError: Unless the factor is at least 1 and the percentile in (0, 100].
    """
    if positive("far_factor", factor) < 1:
        raise ValueError(f"far_factor must be at least 1, got {factor!r}")
    if not 0 < real_number("far_percentile", percentile) <= 100:
        raise ValueError(f"far_percentile must be above 0 and at most 100, got {percentile!r}")
    return float(factor), float(percentile)


def mean_signature(signatures: Sequence[Signature]) -> Tensor:
    """(d,) float64: the mean over clients of their class means, each weighted by its share."""
    means, weights = _dense(signatures)
    return torch.from_numpy(np.einsum("nc,ncd->d", weights, means) / len(means))


def _with_far(
    distances: NDArray[np.float64], overlaps: NDArray[np.float64], factor: float, percentile: float
) -> SignatureDistances:
    apart = overlaps == 0
    if not apart.any():
        return SignatureDistances(distances, overlaps, None)
    observed = distances[np.triu(~apart, 1)]
    reason = None
    if not observed.size:
        far, reason = NO_OVERLAP, "no two clients share a class"
    else:
        far = max(float(observed.max()), factor * float(np.percentile(observed, percentile))) or NO_OVERLAP
    return SignatureDistances(np.where(apart, far, distances), overlaps, far, reason)


def _dense(signatures: Sequence[Signature]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means (N, C, d) and weights (N, C) over all classes that any client holds; 0 where a client lacks one."""
    widths = {one.means.shape[1] for one in signatures}
    if len(widths) != 1:
        raise ValueError(f"need at least one signature, all of the same width, got widths {sorted(widths)}")
    classes = torch.unique(torch.cat([one.classes for one in signatures]))
    means = np.zeros((len(signatures), len(classes), widths.pop()))
    weights = np.zeros(means.shape[:2])
    for row, one in enumerate(signatures):
        columns = torch.searchsorted(classes, one.classes).numpy()
        means[row, columns] = one.means.double().numpy()
        weights[row, columns] = one.weights.double().numpy()
    return means, weights


def _directions(
    means: NDArray[np.float64], weights: NDArray[np.float64], center: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means of length 1, centred; 0 where a client lacks the class or the centred mean is 0. And (N, C) their noise.

    The noise is the angle by which rounding can have turned a direction; 1 where there is none.
    """
    constant = np.zeros(means.shape[2])
    if center is True:
        constant = np.einsum("nc,ncd->d", weights, means) / len(means)
    elif center is not False:
        constant = np.asarray(center, dtype=np.float64)
        if constant.shape != means.shape[2:]:
            raise ValueError(f"center must have shape {means.shape[2:]}, got {constant.shape}")
    rounding = _PRECISION * np.maximum(np.linalg.norm(means, axis=2), np.linalg.norm(constant))
    means = means - constant
    norms = np.linalg.norm(means, axis=2)
    longer = (weights > 0) & (norms > rounding)
    norms = np.where(longer, norms, 1.0)
    return np.where(longer[:, :, None], means / norms[:, :, None], 0.0), np.where(longer, rounding / norms, 1.0)
