"""Distances between clients' permutation sequences (PA-CFL, Sections 3.3 and 5.4) and between their gradients.

A permutation sequence lists the coordinates of a client's largest gradient values, the most important first. Four
metrics compare two of them:

* ``dtw``: exact dynamic time warping of the indices with |e − e'| as the local cost, the paper's definition.
* ``fastdtw``: its approximation by FastDTW with a radius. Never below the exact value, often far above.
* ``index_overlap``: 1 − |A ∩ B| / |A ∪ B| of the two index sets.
* ``rank_overlap``: 1 − cosine of the vectors with 1 / (1 + rank) at each index, rank counted from 1.

Numba is loaded and the kernels are compiled at the first use (once per machine: they are kept on disk).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclust.checks import choice, positive, positive_int
from fedclust.clustering.gradients import GRADIENT_METRICS, gradient_distances
from fedclust.clustering.sequences import Numbers, as_matrix, as_sequence, require_indices
from fedclust.cores import available_cores

__all__ = ["GRADIENT_METRICS", "SEQUENCE_METRICS", "distances_to", "dtw", "fastdtw", "gradient_distances", "pairwise"]

SEQUENCE_METRICS = ("dtw", "fastdtw", "index_overlap", "rank_overlap")
_CELLS_PER_TASK = 10**8  # some tens of milliseconds
_WARN_ABOVE = 60.0  # seconds
Kernel = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]], None]


def dtw(a: Any, b: Any) -> int | float:
    """Exact dynamic time warping distance with |x − y| as the local cost.

    Args:
        a: (m,) sequence of numbers, m >= 1.
        b: (n,) likewise; lengths may differ.

    Returns:
        An int if both sequences hold integers, else a float.

    Raises:
        ValueError: for empty sequences, NaN, infinity, or integers whose distance could pass 2**62.
    """
    from fedclust.clustering.dtw import dtw_cost

    one, other = as_sequence(a, "a"), as_sequence(b, "b")
    (one, other), never = _narrowed(one, other)
    value = dtw_cost(one, other[::-1].copy(), never)
    return float(value) if one.dtype.kind == "f" else int(value)


def fastdtw(a: Any, b: Any, radius: int = 1) -> float:
    """FastDTW distance with |x − y| as the local cost.

    Exact if one of the sequences is shorter than radius + 2. Not symmetric in rare cases (ties between paths).

    Args:
        a: (m,) sequence of numbers, m >= 1.
        b: (n,) likewise; lengths may differ.
        radius: cells searched around the path of the next coarser level, at least 1.

    Raises:
        ValueError: for empty sequences, NaN, infinity or a radius below 1.
    """
    from fedclust.clustering.fastdtw import fastdtw_cost

    one, other = as_sequence(a, "a"), as_sequence(b, "b")
    width = min(positive_int("radius", radius), max(len(one), len(other)))
    return float(fastdtw_cost(one.astype(np.float64), other.astype(np.float64), width))


def pairwise(
    sequences: Sequence[Any] | Numbers,
    metric: str = "dtw",
    *,
    radius: int = 1,
    ids: Sequence[Any] | None = None,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    max_seconds: float | None = None,
) -> NDArray[np.float64]:
    """Distances between all pairs of clients.

    Every pair is computed once. The result depends neither on the number of threads nor, but for its order, on the
    order of the clients: `fastdtw`, which is not quite symmetric, compares the sequence that is smaller in dictionary
    order with the other.

    The warping metrics need time in proportion to N² k² (`dtw`) or N² k (`fastdtw`), and O(k) memory per pair. One pair
    is timed first: a job that will take more than a minute is announced by a warning, one that will take longer than
    `max_seconds` is not started.

    Args:
        sequences: one sequence per client, all of the same length k >= 1; list of arrays or array (N, k).
        metric: one of `SEQUENCE_METRICS`; the overlaps need distinct indices of at least 0 within each sequence.
        radius: for `fastdtw`.
        ids: (N,) client names for error messages; positions if None.
        threads: for the warping metrics; all cores that this process may use if None.
        progress: called with (pairs done, all pairs) from time to time, in the caller's thread.
        max_seconds: upper limit for the estimated duration, for the warping metrics.

    Returns:
        (N, N) float64, symmetric, exactly 0 on the diagonal. Integer distances are exact up to 2**53.

    Raises:
        ValueError: naming the client, for sequences that do not fit; for arguments out of range; for a job estimated
            to take longer than `max_seconds`.
    """
    choice("metric", metric, SEQUENCE_METRICS)
    radius = positive_int("radius", radius)
    limit = math.inf if max_seconds is None else positive("max_seconds", max_seconds)
    workers = available_cores() if threads is None else positive_int("threads", threads)
    rows = as_matrix(sequences, ids)
    n, k = rows.shape
    if metric in ("index_overlap", "rank_overlap"):
        from fedclust.clustering.overlap import index_overlap, rank_overlap

        require_indices(rows, ids)
        distances = index_overlap(rows) if metric == "index_overlap" else rank_overlap(rows)
        if progress is not None and n > 1:
            progress(n * (n - 1) // 2, n * (n - 1) // 2)
        return distances
    distances = np.zeros((n, n))
    if n > 1:
        kernel = _kernel(rows, metric, min(radius, k))
        cells = k * k if metric == "dtw" else 32 * k * (radius + 1)
        first, second = np.triu_indices(n, 1)
        values = _run(kernel, first, second, max(1, _CELLS_PER_TASK // cells), workers, progress, limit)
        distances[first, second] = values
        distances[second, first] = values
    return distances


def distances_to(
    sequence: Any, others: Sequence[Any] | Numbers, metric: str = "dtw", *, radius: int = 1
) -> NDArray[np.float64]:
    """Distances from one sequence to each of N others, (N,) float64; arguments and errors as of `pairwise`."""
    choice("metric", metric, SEQUENCE_METRICS)
    radius = positive_int("radius", radius)
    if metric in ("index_overlap", "rank_overlap"):
        return np.array([pairwise([sequence, other], metric)[0, 1] for other in others])
    rows = as_matrix([sequence, *others])
    second = np.arange(1, len(rows))
    if not len(second):
        return np.zeros(0)
    kernel = _kernel(rows, metric, min(radius, rows.shape[1]))
    return _run(kernel, 0 * second, second, 1, available_cores(), None, math.inf)


def _narrowed(*arrays: Numbers) -> tuple[tuple[Numbers, ...], Any]:
    """The arrays in the narrowest type whose distances cannot overflow, and that type's largest value.

    Integers are shifted by their common minimum, which no difference notices.
    """
    if any(x.dtype.kind == "f" for x in arrays):
        return tuple(x.astype(np.float64) for x in arrays), np.float64(np.inf)
    low, high = min(int(x.min()) for x in arrays), max(int(x.max()) for x in arrays)
    longest_path = sum(x.shape[-1] for x in arrays) if len(arrays) > 1 else 2 * arrays[0].shape[-1]
    bound = (high - low) * longest_path
    if bound >= 2**62:
        raise ValueError(
            f"sequences with values from {low} to {high} may be {bound} apart, more than 2**62; pass them as floats"
        )
    kind = np.int32 if bound < 2**31 else np.int64
    return tuple((x - low).astype(kind) for x in arrays), kind(np.iinfo(kind).max)


def _kernel(rows: Numbers, metric: str, radius: int) -> Kernel:
    """What fills in the distances of some pairs, compiled for the type of the rows."""
    if metric == "fastdtw":
        from fedclust.clustering.fastdtw import fastdtw_pairs

        floats = rows.astype(np.float64)
        return lambda first, second, out: fastdtw_pairs(floats, first, second, radius, out)
    from fedclust.clustering.dtw import dtw_pairs

    (narrow,), never = _narrowed(rows)
    backward = np.ascontiguousarray(narrow[:, ::-1])
    return lambda first, second, out: dtw_pairs(narrow, backward, first, second, never, out)


def _run(
    kernel: Kernel,
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    per_task: int,
    threads: int,
    progress: Callable[[int, int], None] | None,
    max_seconds: float,
) -> NDArray[np.float64]:
    """Values of all pairs; the first one is computed alone, to know how long the others will take."""
    total = len(first)
    out = np.empty(total)
    kernel(first[:0], second[:0], out[:0])  # compiles, so that this is not timed
    start = time.perf_counter()
    kernel(first[:1], second[:1], out[:1])
    _announce(total, (time.perf_counter() - start) * (total - 1) / threads, max_seconds)
    tasks = [slice(i, min(i + per_task, total)) for i in range(1, total, per_task)]
    pool = ThreadPoolExecutor(max(1, min(threads, len(tasks))), thread_name_prefix="distances")
    try:
        running = {pool.submit(kernel, first[part], second[part], out[part]): part for part in tasks}
        done = 1
        for future in as_completed(running):
            future.result()
            part = running[future]
            done += part.stop - part.start
            if progress is not None:
                progress(done, total)
        if progress is not None and not tasks:
            progress(1, 1)
    finally:
        pool.shutdown(cancel_futures=True)
    return out


def _announce(pairs: int, seconds: float, max_seconds: float) -> None:
    """Refuse a job that takes too long, warn of one that takes long."""
    text = f"the distances of {pairs} pairs will take about {seconds:.0f} s"
    if seconds > max_seconds:
        raise ValueError(
            f"{text}, more than max_seconds={max_seconds:g}; shorten the sequences or use another metric "
            "(fastdtw and index_overlap are the fastest)"
        )
    if seconds > _WARN_ABOVE:
        warnings.warn(text, stacklevel=4)
