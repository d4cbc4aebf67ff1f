"""The geometry target of FedDCN (Sec. III-A and III-B): a UMAP embedding, with its limits checked first."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse.linalg

from fedclust.clustering.checks import as_rows, check_count, one_thread, prefix
from fedclust.clustering.embeddings import active_cache


@dataclass(frozen=True)
class Embedding:
    """A UMAP embedding and the settings that were really used.

    Attributes:
        target: (n, d) float32, finite; row i belongs to row i of the input.
        n_neighbors: neighbours used, ``min(asked, n - 1)``.
        init: ``"spectral"``, or ``"random"`` where the spectral start failed (for example on many equal rows).
    """

    target: np.ndarray
    n_neighbors: int
    init: str


def check_umap_size(n: int, d: int, n_neighbors: int = 15, who: str = "") -> int:
    """Check that n rows can be embedded into d dimensions; return the neighbours that will be used.

    Raises:
        ValueError: if n < d + 2 or n_neighbors < 2.
    """
    check_count(n, "the number of rows", 0, who)
    check_count(d, "n_components", 1, who)
    if isinstance(n_neighbors, bool) or not isinstance(n_neighbors, int | np.integer) or n_neighbors < 2:
        raise ValueError(f"{prefix(who)}n_neighbors must be at least 2, got {n_neighbors!r}")
    if n < d + 2:
        raise ValueError(f"{prefix(who)}UMAP into {d} dimensions needs at least {d + 2} rows, got {n}")
    return min(int(n_neighbors), n - 1)


def umap_embedding(
    x: Any,
    n_components: int,
    *,
    n_neighbors: int = 15,
    min_dist: float = 0.1,
    metric: str = "euclidean",
    disconnection_distance: float | None = None,
    seed: int,
    who: str = "",
) -> Embedding:
    """Embed the rows of ``x`` with UMAP.

    The same rows in the same order with the same seed give the same bits; permuted rows do not. Compute an embedding
    once and ship it as data. Calls from several threads run one after the other.

    Args:
        x: (n, features) tensor or array, n >= n_components + 2.
        n_components: width d of the embedding.
        n_neighbors: at least 2; cut to n - 1.
        min_dist: smallest distance between embedded points, 0 to 1.
        metric: a metric known to UMAP.
        disconnection_distance: rows farther apart than this count as not connected.
        seed: non-negative integer.
        who: name put in front of error messages, such as ``"client 3"``.

    Raises:
        ValueError: for arguments out of range, non-finite input, or rows that UMAP could not place.
    """
    rows = as_rows(x, "x", who).cpu().numpy().astype(np.float32)
    used = check_umap_size(len(rows), n_components, n_neighbors, who)
    check_count(seed, "seed", 0, who)
    if not (isinstance(min_dist, int | float) and 0 <= min_dist <= 1):
        raise ValueError(f"{prefix(who)}min_dist must lie in [0, 1], got {min_dist!r}")
    settings = {"n_components": int(n_components), "n_neighbors": used, "min_dist": float(min_dist), "metric": metric}
    if disconnection_distance is not None:
        settings["disconnection_distance"] = disconnection_distance
    cache = active_cache()
    key = "" if cache is None else cache.key(rows, settings, seed % 2**32)
    kept = None if cache is None else cache.get(key)
    target, init = _fit(rows, settings, seed % 2**32) if kept is None else kept
    if cache is not None and kept is None:
        cache.put(key, target, init)
    return Embedding(target=_finite(target, who), n_neighbors=used, init=init)


def _fit(rows: np.ndarray, settings: dict[str, Any], seed: int) -> tuple[np.ndarray, str]:
    with one_thread(), _seeded_eigsh(seed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from umap import UMAP  # takes seconds to import: only who embeds pays for it

        try:
            target = UMAP(**settings, init="spectral", random_state=seed, n_jobs=1).fit_transform(rows)
        except (TypeError, RuntimeError, np.linalg.LinAlgError):
            # What the sparse eigensolver raises when it has too little to work with.
            target = UMAP(**settings, init="random", random_state=seed, n_jobs=1).fit_transform(rows)
            return np.asarray(target, dtype=np.float32), "random"
    # UMAP itself falls back to a random start, and tells so by a warning only.
    failed = any("Spectral initialisation failed" in str(entry.message) for entry in caught)
    return np.asarray(target, dtype=np.float32), "random" if failed else "spectral"


@contextmanager
def _seeded_eigsh(seed: int) -> Iterator[None]:
    """Give SciPy's sparse eigensolver a seed within the block, unless its caller gives one.

    Where a graph is symmetric (equal rows, rows on a ring) the solver runs out of directions and draws new ones, from
    fresh entropy in SciPy 1.17 and later. UMAP has no argument for that seed, and its results then differ run by run.
    """
    original = scipy.sparse.linalg.eigsh
    if "rng" not in inspect.signature(original).parameters:
        yield
        return

    @functools.wraps(original)
    def seeded(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"rng": np.random.default_rng(seed), **kwargs})

    scipy.sparse.linalg.eigsh = seeded
    try:
        yield
    finally:
        scipy.sparse.linalg.eigsh = original


def _finite(target: np.ndarray, who: str) -> np.ndarray:
    bad = int((~np.isfinite(target)).any(axis=1).sum())
    if bad:
        raise ValueError(
            f"{prefix(who)}UMAP could not place {bad} of {len(target)} rows (NaN in the embedding): "
            "they are not connected to the others; raise n_neighbors, rescale the rows or remove outliers"
        )
    return target
