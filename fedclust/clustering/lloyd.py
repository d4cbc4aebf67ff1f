"""Lloyd's algorithm on tensors: the numerical core behind :mod:`fedclust.clustering.kmeans`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CHUNK = 2**22  # elements of the largest temporary: 32 MiB in float64


def _chunk_rows(width: int) -> int:
    return max(1, _CHUNK // max(1, width))


def squared_distances_to(x: Tensor, centers: Tensor) -> Tensor:
    """Squared Euclidean distances (n, K), by direct differences so that equal points give exactly 0."""
    size = _chunk_rows(centers.numel())
    if len(x) == 0:
        return x.new_zeros(0, len(centers))
    return torch.cat([(part[:, None, :] - centers).square().sum(dim=2) for part in torch.split(x, size)])


def nearest(x: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest centre (n,) of each row and its squared distance (n,); ties go to the lower index."""
    labels = torch.empty(len(x), dtype=torch.int64, device=x.device)
    distances = torch.empty(len(x), dtype=x.dtype, device=x.device)
    size = _chunk_rows(centers.numel())
    for first in range(0, len(x), size):
        table = squared_distances_to(x[first : first + size], centers)
        best = table.argmin(dim=1)
        labels[first : first + size] = best
        distances[first : first + size] = table.gather(1, best[:, None]).squeeze(1)
    return labels, distances


def lloyd(
    x: Tensor, n_clusters: int, init: Tensor | None, n_init: int, max_iter: int, tol: float, seed: int
) -> tuple[Tensor, int]:
    """Centres (K, d) and iterations of the run with the lowest inertia; arguments already checked."""
    wide = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        data = x.to(wide)
        threshold = tol * float(data.var(dim=0, unbiased=False).mean())
        if init is not None:
            centers, n_iter, _ = _run(data, init.to(wide), max_iter, threshold)
            return centers, n_iter
        # Drawn on the CPU, so that a seed means the same start on every device.
        generator = torch.Generator().manual_seed(seed % 2**64)
        best: tuple[Tensor, int, float] | None = None
        for _ in range(n_init):
            run = _run(data, _plus_plus(data, n_clusters, generator), max_iter, threshold)
            best = run if best is None or run[2] < best[2] else best
        assert best is not None
        return best[0], best[1]


def _run(x: Tensor, centers: Tensor, max_iter: int, threshold: float) -> tuple[Tensor, int, float]:
    previous: Tensor | None = None
    n_iter = 0
    while n_iter < max_iter:
        n_iter += 1
        labels, distances = nearest(x, centers)
        updated = _means(x, labels, distances, centers)
        shift = float((updated - centers).square().sum())
        centers = updated
        if shift <= threshold or (previous is not None and torch.equal(labels, previous)):
            break
        previous = labels
    return centers, n_iter, float(nearest(x, centers)[1].sum())


def _means(x: Tensor, labels: Tensor, distances: Tensor, centers: Tensor) -> Tensor:
    """Row means of the clusters; an empty one takes the row farthest from its centre, or stays where it is."""
    k = len(centers)
    counts = torch.bincount(labels, minlength=k).to(x.dtype)
    sums = torch.zeros_like(centers)
    size = _chunk_rows(k)
    # One-hot products instead of index_add_: additions by atomics have no fixed order on a GPU.
    for rows, marks in zip(torch.split(x, size), torch.split(labels, size), strict=True):
        sums += torch.nn.functional.one_hot(marks, k).to(x.dtype).T @ rows
    empty = torch.nonzero(counts == 0).flatten().tolist()
    if empty:
        farthest = torch.sort(distances, descending=True, stable=True).indices[: len(empty)].tolist()
        for cluster, row in zip(empty, farthest, strict=False):
            if float(distances[row]) > 0:
                owner = int(labels[row])
                sums[owner] -= x[row]
                counts[owner] -= 1
                sums[cluster] = x[row]
                counts[cluster] = 1
    return torch.where((counts > 0)[:, None], sums / counts.clamp(min=1)[:, None], centers)


def _plus_plus(x: Tensor, n_clusters: int, generator: torch.Generator) -> Tensor:
    """Greedy k-means++: each new centre is the best of 2 + ln K candidates drawn by squared distance."""
    n = len(x)
    n_candidates = 2 + int(math.log(n_clusters))
    chosen = [int(torch.randint(n, (1,), generator=generator))]
    closest = squared_distances_to(x, x[chosen])[:, 0]
    for _ in range(1, n_clusters):
        # On the CPU: cumulative sums on a GPU are refused in PyTorch's deterministic mode.
        mass = torch.cumsum(closest.cpu(), dim=0)
        draws = torch.rand(n_candidates, generator=generator, dtype=torch.float64)
        # At total 0 every row is a centre already, and any row will do.
        targets = draws.to(mass.dtype) * mass[-1]
        candidates = torch.searchsorted(mass, targets, right=True).clamp(max=n - 1).to(x.device)
        options = torch.minimum(closest[:, None], squared_distances_to(x, x[candidates]))
        pick = int(options.sum(dim=0).argmin())
        chosen.append(int(candidates[pick]))
        closest = options[:, pick]
    return x[chosen].clone()
