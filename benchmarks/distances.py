"""Pairwise distances of permutation sequences: against the published packages, and how they grow.

    python benchmarks/distances.py                                   # everything, at the sizes of the paper
    python benchmarks/distances.py --sections exact,speed            # some of it
    python benchmarks/distances.py --clients 4 --length 200 --long 400 --overlap-clients 4 --out /tmp/try

Sections:
    exact    all pairs at k = --length: DTW and FastDTW here, fastdtw (PyPI, radius 1), dtaidistance, tslearn
    fast     the same at k = --long; some of the peers' pairs are timed and scaled up
    overlap  index_overlap: growth in N at k = --long, and in k at the largest N; seconds and peak memory
    growth   exponents of the time of DTW and FastDTW in N and in k, from fits on a log-log scale
    speed    cells per second and core of one pair, beside a plain loop and beside the inner loop with cached operands

Clients form five groups; a group shares a pool of 2k coordinates of which every client holds half, in its own order.
Kernels are compiled before the clock starts. Our figures are the best of --repeats runs of one call for all pairs, on 1
and on --threads threads; peers' are those of one run, pair by pair on one thread, also where they have a matrix call
with threads. Peers that are not installed are left out and named. tslearn squares its local costs: same work, another
value. The machine's load at the start is written down: on a busy machine two threads gain little. `overlap` needs Linux
for the peak memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
from distances_overlap import clock, sequences
from distances_peers import PEERS, row_by_row, step_speed
from distances_table import Rows, markdown, section

from fedclust.clustering.distances import dtw, fastdtw, pairwise

SECTIONS = ("exact", "fast", "overlap", "growth", "speed")
PACKAGES = ("numpy", "scipy", "numba", "fastdtw", "dtaidistance", "tslearn")


def against_peers(options: argparse.Namespace, rows: np.ndarray, peer_pairs: int) -> Rows:
    """Seconds for all pairs here and with each peer, scaled up from the pairs that were timed."""
    n = len(rows)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    results: Rows = []
    for metric in ("dtw", "fastdtw"):
        pairwise(rows[:2, :9], metric)
        for threads in sorted({1, options.threads}):
            seconds = clock(partial(pairwise, rows, metric, threads=threads), options.repeats)
            name = f"fedclust {metric}, {threads} thread{'s' if threads > 1 else ''}"
            results.append({"what": name, "seconds": seconds, "pairs timed": len(pairs)})
    for name, load in PEERS.items():
        try:
            distance = load()
        except ImportError:
            results.append({"what": f"{name}: not installed"})
            continue
        distance(rows[0, :9], rows[1, :9])
        timed = pairs[: peer_pairs or len(pairs)]
        spent = clock(lambda f=distance, p=timed: [f(rows[i], rows[j]) for i, j in p], 1)
        results.append({"what": name, "seconds": spent * len(pairs) / len(timed), "pairs timed": len(timed)})
    return results


def exact(options: argparse.Namespace) -> Rows:
    """Section `exact`."""
    return against_peers(options, sequences(options.clients, options.length, options.dimension), options.pairs)


def fast(options: argparse.Namespace) -> Rows:
    """Section `fast`."""
    return against_peers(options, sequences(options.clients, options.long, options.long_dimension), options.long_pairs)


def overlap(options: argparse.Namespace) -> Rows:
    """Section `overlap`: growth in N at k = --long, and growth in k at the largest N."""
    most = max(options.overlap_clients)
    by_n = [in_a_child(n, options.long, options) for n in options.overlap_clients]
    lengths = sorted({max(2, options.long * part // 4) for part in (1, 2)})
    by_k = [*(in_a_child(most, k, options) for k in lengths), next(row for row in by_n if row["clients"] == most)]
    results = [*by_n, *by_k[:-1]]
    for name, key, rows in (("N", "clients", by_n), ("k", "k", by_k)):
        if len(rows) > 1:
            exponent = slope([row[key] for row in rows], [row["seconds"] for row in rows])
            results.append({"what": f"exponent in {name}", "exponent": exponent})
    return results


def in_a_child(n: int, k: int, options: argparse.Namespace) -> dict[str, Any]:
    """One size in a fresh process, so that its peak of memory is its own."""
    numbers = map(str, (n, k, options.long_dimension, options.repeats))
    command = [sys.executable, str(Path(__file__).with_name("distances_overlap.py")), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def growth(options: argparse.Namespace) -> Rows:
    """Section `growth`: one thread, sizes doubled up to those of section `exact`."""
    rows = sequences(options.clients, options.length, options.dimension)
    clients = [max(2, len(rows) * part // 4) for part in (1, 2, 4)]
    lengths = [max(2, rows.shape[1] * part // 4) for part in (1, 2, 4)]
    results: Rows = []
    for metric in ("dtw", "fastdtw"):
        pairwise(rows[:2, :9], metric)
        by_n = [clock(partial(pairwise, rows[:n], metric, threads=1), options.repeats) for n in clients]
        by_k = [clock(partial(pairwise, rows[:, :k], metric, threads=1), options.repeats) for k in lengths]
        for name, sizes, seconds in (("N", clients, by_n), ("k", lengths, by_k)):
            what = f"{metric}, {name} = {', '.join(map(str, sizes))}"
            results.append({"what": what, "seconds": seconds[-1], "exponent": slope(sizes, seconds)})
            results[-1]["seconds by size"] = seconds
    return results


def slope(sizes: list[int], seconds: list[float]) -> float:
    """Exponent e of seconds ~ sizes**e."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0]) if len(set(sizes)) > 1 else float("nan")


def speed(options: argparse.Namespace) -> Rows:
    """Section `speed`: one thread, one pair; processor time, which other processes disturb least."""
    results: Rows = []
    for k, d in ((options.length, options.dimension), (options.long, options.long_dimension)):
        a, b = sequences(2, k, d)
        kind = np.int32 if 2 * k * d < 2**31 else np.int64
        loops = {
            "fedclust dtw": lambda a=a, b=b: dtw(a, b),
            "row by row": lambda a=a, b=b: row_by_row(a, b),
            "fedclust fastdtw": lambda a=a, b=b: fastdtw(a, b),
        }
        best = dict.fromkeys(loops, float("inf"))
        for turn in range(options.repeats + 1):
            for name, loop in loops.items():
                start = time.thread_time()
                loop()
                best[name] = min(best[name], time.thread_time() - start) if turn else best[name]
        ceiling = step_speed(kind, options.repeats)
        for name, seconds in best.items():
            row: dict[str, Any] = {"what": f"{name}, k = {k}", "seconds": seconds}
            if name != "fedclust fastdtw":
                row |= {"cells/s/core": k * k / seconds, "share of the inner loop": k * k / seconds / ceiling}
            results.append(row)
        results.append({"what": f"inner loop on cached operands, {kind.__name__}", "cells/s/core": ceiling})
    return results


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", type=common.words, default=list(SECTIONS))
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--length", type=int, default=1455)
    parser.add_argument("--dimension", type=int, default=582_026)
    parser.add_argument("--pairs", type=int, default=0, help="pairs timed with each peer in `exact`; 0 for all")
    parser.add_argument("--long", type=int, default=25_000)
    parser.add_argument("--long-dimension", type=int, default=10**7)
    parser.add_argument("--long-pairs", type=int, default=3, help="pairs timed with each peer in `fast`; 0 for all")
    parser.add_argument("--overlap-clients", type=common.integers, default=[10, 20, 50, 100, 200, 500])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--table", action="store_true", help="only write the Markdown from the JSON")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"--sections must be some of {', '.join(SECTIONS)}, got {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    """Measures, prints and writes."""
    options = parse()
    path = options.out / "distances.json"
    if options.table:
        path.with_suffix(".md").write_text(markdown(json.loads(path.read_text())))
        return
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "table")}
    machine = {**common.machine(), **common.versions(PACKAGES)}
    report: dict[str, Any] = {"settings": settings, "machine": machine, "sections": {}}
    work = {"exact": exact, "fast": fast, "overlap": overlap, "growth": growth, "speed": speed}
    for name in options.sections:
        report["sections"][name] = work[name](options)
        print(section(name, report["sections"][name], settings), end="\n\n", flush=True)
    common.write_json(path, report)
    path.with_suffix(".md").write_text(markdown(report))


if __name__ == "__main__":
    main()
