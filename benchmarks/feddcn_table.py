"""Markdown tables of the FedDCN runs beside the paper's Table II."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import common

# Table II of arXiv:2609.21829: best, mean and standard deviation over five runs, of ACC and NMI.
PAPER = {
    ("mnist", "iid", 5): (".8026", ".7643 ± .0525", ".7592", ".7445 ± .0144"),
    ("mnist", "noniid", 5): (".7799", ".7328 ± .0515", ".7922", ".7693 ± .0221"),
    ("mnist", "iid", 20): (".7160", ".6838 ± .0206", ".6772", ".6666 ± .0103"),
    ("mnist", "noniid", 20): (".7636", ".7029 ± .0475", ".7442", ".6981 ± .0423"),
    ("fashion_mnist", "iid", 5): (".6427", ".5866 ± .0443", ".6491", ".6164 ± .0183"),
    ("fashion_mnist", "noniid", 5): (".5885", ".5650 ± .0253", ".6103", ".6022 ± .0090"),
    ("fashion_mnist", "iid", 20): (".6028", ".5849 ± .0117", ".6193", ".6003 ± .0182"),
    ("fashion_mnist", "noniid", 20): (".5561", ".5241 ± .0318", ".5956", ".5720 ± .0269"),
    ("usps", "iid", 5): (".7848", ".7521 ± .0448", ".7472", ".7323 ± .0164"),
    ("usps", "noniid", 5): (".6956", ".6239 ± .0577", ".7364", ".7100 ± .0280"),
    ("usps", "iid", 20): (".7653", ".6994 ± .0597", ".7036", ".6825 ± .0095"),
    ("usps", "noniid", 20): (".7803", ".7159 ± .0372", ".7076", ".6925 ± .0124"),
}
HEADER = (
    "| data | scenario | clients | variant | precision | seeds | ACC | NMI | ARI | DBI | rounds | seconds "
    "| ACC (label stop) | NMI (label stop) | paper ACC best (mean) | paper NMI best (mean) |"
)
INTRO = """# FedDCN beside the paper

Mean ± sample standard deviation over the seeds, test split. ACC to DBI: stopped and selected by `val/dbi`, which uses
no labels. "label stop": selected by validation accuracy among the same rounds, which uses labels, as the paper did.
rounds: until the label-free stop. Written by `python benchmarks/reproduce_feddcn.py --table`.
"""
GRID = ("paper", "isotropic_assigned", "diagonal_within_sigma", "diagonal_assigned")
GRID_INTRO = """
## The sampling grid after equally many rounds

One seed; of each run's first rounds, as many as the shortest of them has, the one with the best `val/dbi`; test split.

| data | scenario | clients | variant | seed | of rounds | round | ACC | NMI |
|---|---|---|---|---|---|---|---|---|"""


def write_table(folder: Path) -> str:
    """Writes `feddcn.md` from all JSONs of the folder and returns its text."""
    cells: dict[tuple[str, str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob("feddcn_*_*.json")):
        run = json.loads(path.read_text())
        if "dataset" not in run:  # of feddcn_encoded.py
            continue
        cells[run["dataset"], run["scenario"], run["clients"], run["variant"]].append(run)
    lines = [INTRO, HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    lines += [_line(cell, runs) for cell, runs in sorted(cells.items())]
    grid = _grid(cells)
    text = "\n".join([*lines, *([GRID_INTRO, *grid] if grid else [])]) + "\n"
    (folder / "feddcn.md").write_text(text)
    return text


def _line(cell: tuple[str, str, int, str], runs: list[dict[str, Any]]) -> str:
    dataset, scenario, clients, variant = cell
    labelled = [run["label_based"] for run in runs]
    paper = PAPER.get((dataset, scenario, clients), ("", "", "", ""))
    seeds = ",".join(str(run["seed"]) for run in sorted(runs, key=lambda run: run["seed"]))
    columns = [
        dataset, scenario, str(clients), variant, "/".join(sorted({run["precision"] for run in runs})), seeds,
        *(common.spread([run[name] for run in runs]) for name in ("acc", "nmi", "ari", "dbi")),
        _whole(run["rounds"] for run in runs), _whole(run["seconds"] for run in runs),
        *(common.spread([run[name] for run in labelled]) for name in ("acc", "nmi")),
        f"{paper[0]} ({paper[1]})" if paper[0] else "", f"{paper[2]} ({paper[3]})" if paper[2] else "",
    ]  # fmt: skip
    return common.row(columns)


def _grid(cells: dict[tuple[str, str, int, str], list[dict[str, Any]]]) -> list[str]:
    """Rows of the second table: seed 0 of the whole grids whose runs differ in length."""
    lines = []
    for dataset, scenario, clients in sorted({cell[:3] for cell in cells}):
        found = {
            name: run for name in GRID for run in cells.get((dataset, scenario, clients, name), []) if run["seed"] == 0
        }
        rounds = min((run["rounds_run"] for run in found.values()), default=0)
        if set(found) != set(GRID) or all(run["rounds_run"] == rounds for run in found.values()):
            continue
        for name, run in found.items():
            best = min(run["history"][:rounds], key=lambda row: row["val/dbi"])
            lines.append(
                f"| {dataset} | {scenario} | {clients} | {name} | 0 | {rounds} | {best['round']} "
                f"| {best['test/acc']:.3f} | {best['test/nmi']:.3f} |"
            )
    return lines


def _whole(values: Any) -> str:
    return ", ".join(f"{value:.0f}" for value in values)
