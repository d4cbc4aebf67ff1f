"""The report of benchmarks/distances.py as Markdown."""

from __future__ import annotations

import json
from typing import Any

import common

Rows = list[dict[str, Any]]
INTRO = """# Pairwise distances

How it was timed. **Ours**: all pairs in one call of `pairwise`, on as many threads as the row says, kernels compiled
before the clock starts; the fastest of `repeats` runs. **Peers**: pair by pair from Python, on one thread, after one
short pair as a warm-up; one run over the pairs timed, scaled up to all pairs. dtaidistance (`distance_matrix_fast`)
and tslearn (`cdist_dtw`) also have matrix calls that can use several threads. These were not used, so compare one
thread with one thread, or cells per second and core; our rows with more threads have no counterpart here.

**Result**: exact dynamic time warping, or FastDTW's approximation at radius 1, which visits a small part of the cells.
`times ours` divides by our seconds on one thread for the same kind of result; there is none across the two kinds.
tslearn squares its local costs: the same work, another value.

Written by `python benchmarks/distances.py`, whose docstring says what each section does; `--table` writes it again from
the JSON.
"""
NOTES = {
    "exact": "All pairs at k = `length`.",
    "fast": "All pairs at k = `long`.",
    "overlap": "`index_overlap` at k = `long` where the row gives no other; fastest of `repeats` runs, in a process "
    "of its own per size. extra MB: peak memory beyond what the process held before, which includes the sequences.",
    "growth": "One thread, sizes doubled up to those of section exact; the fastest of `repeats` runs. Exponents are "
    "slopes on a log-log scale.",
    "speed": "One pair on one thread, processor time, the fastest of `repeats` runs.",
}


def markdown(report: dict[str, Any]) -> str:
    """The whole report."""
    lines = [
        INTRO,
        f"Settings: `{json.dumps(report['settings'])}`",
        "",
        f"Machine: {json.dumps(report['machine'])}",
        "",
    ]
    for name, rows in report["sections"].items():
        lines += [section(name, rows, report["settings"]), ""]
    return "\n".join(lines).rstrip() + "\n"


def section(name: str, rows: Rows, settings: dict[str, Any]) -> str:
    """One section's heading, note and table."""
    if name in ("exact", "fast"):
        rows = compared(rows, settings["clients"], settings["length" if name == "exact" else "long"])
    keys = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], list)))
    lines = [f"## {name}", "", NOTES[name], "", *common.heading(keys)]
    return "\n".join([*lines, *(common.row(shown(row.get(key)) for key in keys) for row in rows)])


def compared(rows: Rows, n: int, k: int) -> Rows:
    """The rows with what is derived: kind of result, cells per second and core, and ratios within one kind."""
    ours = {kind_of(row["what"]): row["seconds"] for row in rows if row["what"].endswith(", 1 thread")}
    found = []
    for row in rows:
        what, kind = row["what"], kind_of(row["what"])
        if "seconds" not in row:
            found.append({"what": what})
            continue
        new = {"what": what, "result": kind, "seconds": row["seconds"], "pairs timed": row["pairs timed"]}
        if what.startswith("fedclust"):
            threads = int(what.split()[-2])
        else:
            threads = 1
            if kind in ours:
                new["times ours"] = row["seconds"] / ours[kind]
        if kind == "exact":
            new["cells/s/core"] = n * (n - 1) / 2 * k * k / row["seconds"] / threads
        found.append(new)
    return found


def kind_of(what: str) -> str:
    """Whether a row's distances are exact."""
    return "approximate" if "fastdtw" in what else "exact"


def shown(value: Any) -> str:
    """A table's cell."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e4 else f"{value:.2e}"
    return "" if value is None else str(value)
