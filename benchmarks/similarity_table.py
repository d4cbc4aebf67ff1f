"""Markdown tables of the similarity benchmark."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import common

INTRO = """# PA-CFL's similarities

Mean ± sample standard deviation over the seeds. Written by `python benchmarks/similarity_pa_cfl.py`, whose docstring
says what was done.
"""
OVERLAP_NOTE = """Distance of U1 to the user with the given label overlap, divided by the largest of the measure; ρ:
Spearman's coefficient of distance and overlap, −1 for a measure that falls all along."""
CLUSTER_NOTE = """ARI: pre-clusters against the planted groups. ρ: Spearman's coefficient, over pairs of users, of the
distance and the total variation distance of the label shares; 1 for a measure that orders pairs as the labels do, where
no pairs tie. In Set-2 almost all pairs tie (their label distance is 0 or 1), so that a perfect order stays well below
1: there ρ compares measures with each other only. seconds: the distances of all pairs, on a shared machine; the first
use of a measure in a process includes loading its kernels."""


def markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    overlap: dict[str, list[dict[str, Any]]] = defaultdict(list)
    clusters: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for cell in report["cells"].values():
        if cell["part"] == "overlap":
            overlap[cell["dataset"]].append(cell)
        else:
            clusters[cell["dataset"], cell["partition"], cell["clients"]].append(cell)
    settings = ", ".join(f"{name} {value}" for name, value in report["settings"].items())
    lines = [INTRO, f"Settings: {settings}.", ""]
    for dataset, cells in sorted(overlap.items()):
        lines += [f"## Label overlap (Figure 11a), {dataset}, seeds {_seeds(cells)}", "", OVERLAP_NOTE, ""]
        lines += [*_overlap_table(cells), ""]
    if clusters:
        lines += ["## Pre-clusters", "", CLUSTER_NOTE, ""]
    for (dataset, partition, users), cells in sorted(clusters.items()):
        trained = _spread([cell["train_seconds"] for cell in cells], 0)
        lines += [f"### {dataset}, {partition}, N = {users}, seeds {_seeds(cells)}, {trained} s of training", ""]
        lines += [*_cluster_table(cells), ""]
    return "\n".join(lines).rstrip() + "\n"


def _overlap_table(cells: list[dict[str, Any]]) -> list[str]:
    heads = [f"{overlap:.0%}" for overlap in cells[0]["overlaps"]]
    lines = common.heading(["similarity", *heads, "ρ"])
    for name in cells[0]["by"]:
        rows = [cell["by"][name] for cell in cells if name in cell["by"]]
        columns = [_spread([row["normalised"][place] for row in rows], 3) for place in range(len(heads))]
        lines.append(common.row([name, *columns, _spread([row["spearman"] for row in rows], 3)]))
    return lines


def _cluster_table(cells: list[dict[str, Any]]) -> list[str]:
    figures = [("ARI", "ari", 3), ("clusters", "clusters", 1), ("ρ", "spearman", 3), ("seconds", "seconds", 2)]
    if not any("ari" in row for cell in cells for row in cell["by"].values()):
        figures = figures[1:]
    lines = common.heading(["similarity", *(head for head, _, _ in figures)])
    for name in cells[0]["by"]:
        rows = [cell["by"][name] for cell in cells if name in cell["by"]]
        columns = [_spread([row[key] for row in rows], digits) for _, key, digits in figures]
        lines.append(common.row([name, *columns]))
    return lines


def _seeds(cells: list[dict[str, Any]]) -> str:
    return ",".join(str(seed) for seed in sorted(cell["seed"] for cell in cells))


def _spread(values: list[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return common.spread(known, digits) if known else ""
