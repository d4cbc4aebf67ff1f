"""How good a clustering is: against labels (ACC, NMI, ARI), and without them (Davies-Bouldin, collapse)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from torch import Tensor

LARGEST_SHARE = 0.99
SMALLEST_VARIANCE = 1e-8


def clustering_accuracy(true: Any, pred: Any) -> float:
    """Share of rows that agree under the best one-to-one match of clusters to classes (FedDCN, Eq. 7).

    Args:
        true: (n,) class of each row, integers of at least 0, not necessarily contiguous.
        pred: (n,) cluster of each row, likewise; the number of clusters need not be that of the classes.

    Raises:
        ValueError: for empty input, lengths that differ, negative or non-integer labels.
    """
    true, pred = _labels(true, "true"), _labels(pred, "pred")
    _same_length(true, pred)
    classes, true = np.unique(true, return_inverse=True)
    clusters, pred = np.unique(pred, return_inverse=True)
    return _accuracy(contingency_table(true, pred, len(classes), len(clusters)))


def contingency_table(true: Any, pred: Any, n_classes: int, n_clusters: int) -> np.ndarray:
    """Number of rows of each class in each cluster, (n_classes, n_clusters) int64.

    Tables of several clients over disjoint rows may be added up.

    Raises:
        ValueError: as :func:`clustering_accuracy`, or for labels that do not lie below ``n_classes``, ``n_clusters``.
    """
    true, pred = _labels(true, "true"), _labels(pred, "pred")
    _same_length(true, pred)
    for values, name, bound in ((true, "true", n_classes), (pred, "pred", n_clusters)):
        if values.max() >= bound:
            raise ValueError(f"{name} must hold labels below {bound}, got {values.max()}")
    flat = np.bincount(true * n_clusters + pred, minlength=n_classes * n_clusters)
    return flat.reshape(n_classes, n_clusters).astype(np.int64)


def scores_from_contingency(table: Any) -> dict[str, float]:
    """``{"acc", "nmi", "ari"}`` of a contingency table (classes, clusters).

    acc: see :func:`clustering_accuracy`. nmi: mutual information over the arithmetic mean of the entropies (Eq. 8).
    ari: adjusted Rand index. The latter two equal scikit-learn's on the labels that the table counts.

    Raises:
        ValueError: if the table is not two-dimensional, holds negative or fractional counts, or is empty.
    """
    counts = _array(table)
    if counts.ndim != 2 or counts.dtype.kind not in "iu":
        raise ValueError(
            f"the table must hold integers by (class, cluster), got shape {counts.shape} of {counts.dtype}"
        )
    counts = counts.astype(np.int64)
    if (counts < 0).any() or counts.sum() == 0:
        raise ValueError("the table must hold at least one row and no negative count")
    return {"acc": _accuracy(counts), "nmi": _nmi(counts), "ari": _ari(counts)}


def davies_bouldin(x: Any, labels: Any) -> float:
    """Davies-Bouldin index of the clusters that hold rows; lower is better, +inf is degenerate.

    scikit-learn's definition: spread = mean Euclidean distance of a cluster's rows to their mean, separation =
    Euclidean distance of the means. (FedDCN's printed formula can be read as an L1 separation and a spread divided by
    all rows; neither is meant here.) Where that definition has no value or a misleading one, the result is +inf, so
    that a degenerate clustering never wins: fewer than two populated clusters, two clusters with the same mean, or no
    cluster with more than one row.

    Args:
        x: (n, d) rows.
        labels: (n,) cluster of each row, integers of at least 0.

    Raises:
        ValueError: for empty or non-finite input or shapes that do not fit.
    """
    rows = _array(x).astype(np.float64)
    index = _labels(labels, "labels")
    if rows.ndim != 2 or len(rows) != len(index):
        raise ValueError(f"x must have shape ({len(index)}, features) to fit the labels, got {rows.shape}")
    if not np.isfinite(rows).all():
        bad = int((~np.isfinite(rows)).any(axis=1).sum())
        raise ValueError(f"{bad} of {len(rows)} rows of x hold NaN or infinite values")
    _, index = np.unique(index, return_inverse=True)
    counts = np.bincount(index)
    sums = np.zeros((len(counts), rows.shape[1]))
    np.add.at(sums, index, rows)
    distances = np.linalg.norm(rows - (sums / counts[:, None])[index], axis=1)
    return davies_bouldin_from_sums(counts, sums, np.bincount(index, weights=distances))


def davies_bouldin_from_sums(counts: Any, sums: Any, distance_sums: Any) -> float:
    """:func:`davies_bouldin` from sums per cluster, which clients over disjoint rows may add up.

    Args:
        counts: (K,) rows of each cluster; clusters without rows are left out.
        sums: (K, d) sums of the rows.
        distance_sums: (K,) sums of the distances between the rows and the cluster's mean over all clients.

    Raises:
        ValueError: for shapes that do not fit, non-finite or negative values.
    """
    n, totals = _array(counts).astype(np.float64), _array(sums).astype(np.float64)
    spreads = _array(distance_sums).astype(np.float64)
    if n.ndim != 1 or totals.ndim != 2 or len(totals) != len(n) or spreads.shape != n.shape:
        raise ValueError(
            f"need counts (K,), sums (K, d), distance_sums (K,), got {n.shape}, {totals.shape}, {spreads.shape}"
        )
    if not all(np.isfinite(part).all() for part in (n, totals, spreads)) or (n < 0).any() or (spreads < 0).any():
        raise ValueError("counts, sums and distance_sums must be finite, counts and distance_sums not negative")
    held = n > 0
    n, totals, spreads = n[held], totals[held], spreads[held]
    if len(n) < 2 or n.max() < 2:
        return math.inf
    means, spreads = totals / n[:, None], spreads / n
    worst = np.empty(len(n))
    for i in range(len(n)):
        separation = np.linalg.norm(means - means[i], axis=1)
        ratio = np.full(len(n), math.inf)
        np.divide(spreads + spreads[i], separation, out=ratio, where=separation > 0)
        worst[i] = np.delete(ratio, i).max()
    return float(worst.mean())


def collapsed(counts: Any, latent_variance: float) -> str | None:
    """Why a clustering counts as collapsed, or None if it does not.

    Args:
        counts: (K,) rows of each cluster. With K = 1 the size of the cluster says nothing and is not looked at.
        latent_variance: variance of the latents, averaged over their coordinates.

    Raises:
        ValueError: if there is no row at all, or a count is negative.
    """
    sizes = _array(counts)
    if sizes.ndim != 1 or (sizes < 0).any() or sizes.sum() == 0:
        raise ValueError(f"counts must be a list of sizes of at least 0 with at least one row, got {sizes.tolist()}")
    largest = sizes.max() / sizes.sum()
    if len(sizes) > 1 and largest > LARGEST_SHARE:
        return f"cluster {int(sizes.argmax())} holds {largest:.1%} of the rows"
    # Negated, so that NaN counts as collapsed too.
    if not latent_variance >= SMALLEST_VARIANCE:
        return f"the variance of the latents is {latent_variance:.3g}, below {SMALLEST_VARIANCE:g}"
    return None


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)


def _labels(values: Any, name: str) -> np.ndarray:
    labels = _array(values)
    if labels.ndim != 1 or labels.size == 0:
        raise ValueError(f"{name} must be a non-empty list of labels, got shape {labels.shape}")
    if labels.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, got {labels.dtype}")
    labels = labels.astype(np.int64)
    if labels.min() < 0:
        raise ValueError(f"{name} must hold labels of at least 0, got {labels.min()}")
    return labels


def _same_length(true: np.ndarray, pred: np.ndarray) -> None:
    if len(true) != len(pred):
        raise ValueError(f"true and pred must have the same length, got {len(true)} and {len(pred)}")


def _accuracy(table: np.ndarray) -> float:
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(table[rows, columns].sum() / table.sum())


def _nmi(table: np.ndarray) -> float:
    joint = table / table.sum()
    by_class, by_cluster = joint.sum(axis=1), joint.sum(axis=0)
    if (by_class > 0).sum() == 1 and (by_cluster > 0).sum() == 1:
        return 1.0
    held = joint > 0
    expected = np.outer(by_class, by_cluster)[held]
    information = float((joint[held] * (np.log(joint[held]) - np.log(expected))).sum())
    if information <= np.finfo(np.float64).eps:
        return 0.0
    return min(1.0, 2 * information / (_entropy(by_class) + _entropy(by_cluster)))


def _entropy(shares: np.ndarray) -> float:
    held = shares[shares > 0]
    return float(-(held * np.log(held)).sum())


def _ari(table: np.ndarray) -> float:
    # Python integers: products of pair counts pass 64 bits at about 60,000 rows.
    n = int(table.sum())
    together = sum(v * v for v in table[table > 0].tolist())
    in_classes = sum(v * v for v in table.sum(axis=1).tolist())
    in_clusters = sum(v * v for v in table.sum(axis=0).tolist())
    both, only_cluster, only_class = together - n, in_clusters - together, in_classes - together
    neither = n * n - together - only_cluster - only_class
    if only_cluster == 0 and only_class == 0:
        return 1.0
    agreement = 2 * (both * neither - only_class * only_cluster)
    chance = (both + only_class) * (only_class + neither) + (both + only_cluster) * (only_cluster + neither)
    return float(agreement / chance)
