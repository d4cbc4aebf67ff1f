"""One size of section `overlap` of distances.py, in a process of its own: `python distances_overlap.py N K D REPEATS`.

Prints its seconds and its peak of memory as JSON. Needs Linux, and imports little, so that little is held beforehand.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedclust.clustering.distances import pairwise
from fedclust.random import numpy_generator


def sequences(n: int, k: int, d: int) -> np.ndarray:
    """(n, k) permutation sequences of n clients in five groups."""
    pools = [numpy_generator(0, "pool", group).choice(d, min(d, 2 * k), replace=False) for group in range(5)]
    return np.stack([numpy_generator(0, "client", i).permutation(pools[i % 5])[:k] for i in range(n)])


def clock(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest run."""
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def memory(entry: str) -> int:
    """MB of this process, from the kernel's books (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith(entry)) / 1024)


def main() -> None:
    """Measures and prints."""
    n, k, d, repeats = (int(argument) for argument in sys.argv[1:])
    rows = sequences(n, k, d)
    pairwise(rows[:2, :9], "index_overlap")
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of what came before
    seconds = clock(partial(pairwise, rows, "index_overlap"), repeats)
    found = {"what": f"index_overlap, N = {n}, k = {k}", "clients": n, "k": k, "seconds": seconds}
    print(json.dumps(found | {"extra MB": memory("VmHWM") - before, "sequences MB": round(rows.nbytes / 2**20)}))


if __name__ == "__main__":
    main()
