"""k-means: scikit-learn's on the CPU, :func:`torch_kmeans` for tensors on an accelerator.

Both follow one contract.

* Lloyd's algorithm, in float64, with a hard cap on the iterations. Start: greedy k-means++ from
  ``seed``, or the given centres (then exactly one run).
* A cluster that loses its last row moves to the row farthest from its own centre.
* Where no row is away from its centre (fewer distinct rows than clusters) a cluster stays empty: it
  keeps the centre that it started from when centres were given; otherwise its centre repeats another one.
  Either way it is finite, ``populated`` is False for it and ``n_populated`` counts the others. Rows that differ by
  rounding only (8 units in the last place of the largest value) are not distinct.
* Labels always name the centre nearest to the row among the returned ones, ties to the lower index.

The two differ in the draws of k-means++, in rounding, and in which row an empty cluster takes when two rows
are equally far from their centres, or when taking rows empties a second cluster in the same step.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.clustering.checks import as_rows, check_count, one_thread, prefix
from fedclust.clustering.lloyd import lloyd, nearest, squared_distances_to

_ROUNDING = 8  # in units of the last place of the largest value
Array = Any  # a torch.Tensor or a numpy.ndarray; results come back in the kind that was given


@dataclass(frozen=True)
class KMeansResult:
    """Outcome of one k-means fit.

    Tensors for tensor input, numpy arrays for numpy input; float64 stays float64, other types become float32.

    Attributes:
        centers: (K, d) cluster centres, always finite.
        labels: (n,) int64, the nearest centre of each row.
        inertia: sum of the squared distances of the rows to their centres.
        n_iter: Lloyd iterations of the best run.
        n_populated: number of clusters that hold at least one row.
        populated: (K,) bool, which clusters those are.
    """

    centers: Array
    labels: Array
    inertia: float
    n_iter: int
    n_populated: int
    populated: Array

    @property
    def status(self) -> str:
        """For example ``"2 of 4 clusters populated"``."""
        return f"{self.n_populated} of {len(self.populated)} clusters populated"


def kmeans(
    x: Array,
    n_clusters: int,
    *,
    init: Array | None = None,
    n_init: int = 10,
    max_iter: int = 300,
    tol: float = 1e-4,
    seed: int = 0,
    who: str = "",
) -> KMeansResult:
    """Cluster the rows of ``x``.

    Args:
        x: (n, d) tensor or array; a tensor off the CPU is clustered where it lies.
        n_clusters: K, at most n.
        init: (K, d) centres to start from; then a single run is made and ``n_init`` is ignored.
        n_init: runs from different k-means++ starts; the one with the lowest inertia is kept.
        max_iter: cap on the Lloyd iterations of a run.
        tol: stop when the summed squared movement of the centres is at most ``tol`` times the mean variance.
        seed: non-negative integer; the same seed gives the same bits on a CPU.
        who: name put in front of error messages, such as ``"client 3"``.

    Raises:
        ValueError: for fewer rows than clusters, non-finite values or arguments out of range.
    """
    rows = as_rows(x, "x", who)
    start = _check(rows, n_clusters, init, n_init, max_iter, tol, seed, who)
    if rows.device.type != "cpu":
        return torch_kmeans(rows, n_clusters, init=start, n_init=n_init, max_iter=max_iter, tol=tol, seed=seed, who=who)
    # Imported here: scikit-learn takes about a second, and whoever only reads results needs none of it.
    from sklearn.cluster import KMeans

    data = rows.to(torch.float64).numpy()
    model = KMeans(
        n_clusters=n_clusters,
        init="k-means++" if start is None else start.to(torch.float64).numpy(),
        n_init=n_init if start is None else 1,
        max_iter=max_iter,
        tol=tol,
        random_state=seed % 2**32,
        algorithm="lloyd",
    )
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # too few distinct rows is reported by `populated`, not by a warning
        model.fit(data)
    result = _finish(rows, torch.from_numpy(model.cluster_centers_), start, int(model.n_iter_))
    return result if isinstance(x, Tensor) else _as_numpy(result)


def torch_kmeans(
    x: Array,
    n_clusters: int,
    *,
    init: Array | None = None,
    n_init: int = 10,
    max_iter: int = 300,
    tol: float = 1e-4,
    seed: int = 0,
    who: str = "",
) -> KMeansResult:
    """As :func:`kmeans`, in PyTorch on the device of ``x`` (any device, the CPU included)."""
    rows = as_rows(x, "x", who)
    start = _check(rows, n_clusters, init, n_init, max_iter, tol, seed, who)
    centers, n_iter = lloyd(rows, n_clusters, start, n_init, max_iter, tol, seed)
    result = _finish(rows, centers, start, n_iter)
    return result if isinstance(x, Tensor) else _as_numpy(result)


def assign(x: Array, centers: Array) -> Array:
    """Index (n,) int64 of the nearest centre of each row, ties to the lower index.

    Args:
        x: (n, d) tensor or array.
        centers: (K, d), same width.

    Raises:
        ValueError: for shapes that do not fit or non-finite values.
    """
    labels = _nearest(*_pair(x, centers))[0]
    return labels if isinstance(x, Tensor) else labels.numpy()


def squared_distances(x: Array, centers: Array) -> Array:
    """Squared Euclidean distances (n, K) between rows and centres; float64 if either input is, else float32."""
    distances = squared_distances_to(*_pair(x, centers))
    return distances if isinstance(x, Tensor) else distances.numpy()


def _pair(x: Array, centers: Array) -> tuple[Tensor, Tensor]:
    rows = as_rows(x, "x")
    points = as_rows(centers, "centers").to(rows.device)
    if points.shape[1] != rows.shape[1] or len(points) == 0:
        raise ValueError(f"centers must have shape (K >= 1, {rows.shape[1]}), got {tuple(points.shape)}")
    dtype = torch.promote_types(rows.dtype, points.dtype)
    return rows.to(dtype), points.to(dtype)


def _check(
    rows: Tensor, n_clusters: int, init: Array | None, n_init: int, max_iter: int, tol: float, seed: int, who: str
) -> Tensor | None:
    """Validate the arguments of a fit; return the starting centres as tensor, or None."""
    check_count(n_clusters, "n_clusters", 1, who)
    check_count(n_init, "n_init", 1, who)
    check_count(max_iter, "max_iter", 1, who)
    check_count(seed, "seed", 0, who)
    if not (isinstance(tol, int | float) and 0 <= tol < float("inf")):
        raise ValueError(f"{prefix(who)}tol must be a finite number of at least 0, got {tol!r}")
    if len(rows) < n_clusters:
        raise ValueError(f"{prefix(who)}k-means needs at least one row per cluster: {len(rows)} rows, K={n_clusters}")
    if init is None:
        return None
    start = as_rows(init, "init", who)
    if tuple(start.shape) != (n_clusters, rows.shape[1]):
        raise ValueError(f"{prefix(who)}init must have shape ({n_clusters}, {rows.shape[1]}), got {tuple(start.shape)}")
    return start.to(device=rows.device, dtype=rows.dtype)


def _finish(rows: Tensor, centers: Tensor, start: Tensor | None, n_iter: int) -> KMeansResult:
    """Settle empty clusters, then label every row by the centres as they are returned."""
    centers = _merged(centers.to(rows.dtype), rows)
    labels, distances = _nearest(rows, centers)
    counts = torch.bincount(labels, minlength=len(centers))
    if start is not None and bool((counts == 0).any()):
        centers = _merged(torch.where((counts > 0)[:, None], centers, start), rows)
        labels, distances = _nearest(rows, centers)
        counts = torch.bincount(labels, minlength=len(centers))
    populated = counts > 0
    return KMeansResult(
        centers=centers,
        labels=labels,
        inertia=float(distances.to("cpu", torch.float64).sum()),
        n_iter=n_iter,
        n_populated=int(populated.sum()),
        populated=populated,
    )


def _nearest(rows: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """As `nearest`, in float64 where there is any: squares of float32 values overflow from 1e19 and vanish at 1e-23."""
    if rows.device.type == "mps":
        return nearest(rows, centers)
    return nearest(rows.double(), centers.double())


def _merged(centers: Tensor, rows: Tensor) -> Tensor:
    """Centres that differ by no more than rounding become equal to the one of the lowest index.

    A network maps equal inputs to latents that differ in their last bits; these are no distinct rows.
    """
    # Relative to the two coordinates themselves: one far row must not make the others' centres look equal. A coordinate
    # near 0 is a sum that cancelled, with the rounding of the rows' typical size.
    scale = torch.maximum(centers.abs()[:, None], centers.abs()[None])
    scale = torch.maximum(scale, rows.abs().median(0).values)
    near = ((centers[:, None] - centers[None]).abs() <= _ROUNDING * torch.finfo(rows.dtype).eps * scale).all(2)
    return centers[near.int().argmax(1)]


def _as_numpy(result: KMeansResult) -> KMeansResult:
    return KMeansResult(
        centers=np.asarray(result.centers.cpu()),
        labels=np.asarray(result.labels.cpu()),
        inertia=result.inertia,
        n_iter=result.n_iter,
        n_populated=result.n_populated,
        populated=np.asarray(result.populated.cpu()),
    )
