"""PA-CFL's similarities side by side: how they follow label overlap (Figure 11a), and the pre-clusters they give.

    python benchmarks/similarity_pa_cfl.py                                  # both parts, one seed
    python benchmarks/similarity_pa_cfl.py --parts overlap --seeds 0,1,2,3,4
    python benchmarks/similarity_pa_cfl.py --parts clusters --datasets mnist --clients 20 --partitions set2
    python benchmarks/similarity_pa_cfl.py --limit 300 --rows-per-label 6 --clients 5 --epochs 1 --out /tmp/try
    python benchmarks/similarity_pa_cfl.py --table                          # only writes the Markdown again

Users train R = --epochs local epochs from the initial weights of their seed; that happens once per cell, through the
users' own action `describe`, and every similarity is then taken of the same sequences and gradients by the management
server's own functions. Cells are kept in one JSON as they are finished and are not computed again.

overlap   The paper: MNIST, seven users, U1 with labels 0-4, U2 with labels 5-9, the others with overlaps of 20 % to
          100 % with U1; distances of U1 to each, divided by the largest of each measure; η .01, R = 3, batch 64, CNN.
          Where it is silent, ours: the user with overlap o has the five consecutive classes from 5(1 − o) on; every
          user has --rows-per-label rows of each of its classes (600: as many rows as a user has at N = 20) and no row
          is used twice; one round from common initial weights; k = .0025 d; Mahalanobis with the diagonal covariance
          over the seven users. Spearman's coefficient of the distance and the overlap is −1 if the measure falls all
          along; it is the same for every monotone curve, so the normalised values stand beside it.
clusters  Set-2 (five label groups) and Dirichlet, N = 20 and 100. Set-2: adjusted Rand index of the pre-clusters
          against the groups. Dirichlet plants no groups: number of pre-clusters, and Spearman's coefficient, over all
          pairs of users, of the distance and the total variation distance of their label shares (given for Set-2 too,
          where label distances are 0 or 1).

The warping similarities use all cores that the process may use, everything else --threads. Training is in bf16-mixed
where the processor has instructions for it, else in float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import common
from similarity_cells import cluster_cell, overlap_cell
from similarity_table import markdown

from fedclust.clustering.distances import GRADIENT_METRICS, SEQUENCE_METRICS

SIMILARITIES = (*SEQUENCE_METRICS, *GRADIENT_METRICS)
FIXED = ("epochs", "lr", "batch_size", "top_k", "radius", "alpha", "min_size", "rows_per_label", "limit")
Report = dict[str, Any]


def wanted(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The cells that were asked for."""
    cells: list[dict[str, Any]] = []
    for seed in options.seeds:
        if "overlap" in options.parts:
            cells += [{"part": "overlap", "dataset": name, "seed": seed} for name in options.overlap_datasets]
        if "clusters" in options.parts:
            cells += [
                {"part": "clusters", "dataset": dataset, "partition": partition, "clients": users, "seed": seed}
                for dataset in options.datasets
                for partition in options.partitions
                for users in options.clients
            ]
    return cells


def finish(cell: dict[str, Any], names: list[str], options: argparse.Namespace) -> Report:
    """What one cell gives for these similarities."""
    if cell["part"] == "overlap":
        return overlap_cell(cell["dataset"], cell["seed"], names, options)
    return cluster_cell(cell["dataset"], cell["partition"], cell["clients"], cell["seed"], names, options)


def start_report(path: Path, options: argparse.Namespace) -> Report:
    """The report so far, or a new one.

    Raises:
        SystemExit: If the file was made with other settings: its cells could not stand beside new ones.
    """
    settings = {name: getattr(options, name) for name in FIXED}
    if not path.exists():
        return {"settings": settings, "cells": {}}
    report: Report = json.loads(path.read_text())
    differ = [name for name in FIXED if report["settings"][name] != settings[name]]
    if differ:
        raise SystemExit(f"{path} was made with other values of {', '.join(differ)}; choose another --out")
    return report


def save(report: Report, path: Path) -> None:
    """Writes the JSON, whole or not at all, and the Markdown beside it."""
    common.write_json(path, report)
    path.with_suffix(".md").write_text(markdown(report))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=common.words, default=["overlap", "clusters"])
    parser.add_argument("--overlap-datasets", type=common.words, default=["mnist"])
    parser.add_argument("--datasets", type=common.words, default=["mnist", "fashion_mnist"])
    parser.add_argument("--partitions", type=common.words, default=["set2", "dirichlet"])
    parser.add_argument("--clients", type=common.integers, default=[20, 100])
    parser.add_argument("--seeds", type=common.integers, default=[0])
    parser.add_argument("--similarities", type=common.words, default=list(SIMILARITIES))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--top-k", type=float, default=0.0025)
    parser.add_argument("--radius", type=int, default=1, help="of FastDTW")
    parser.add_argument("--alpha", type=float, default=0.1, help="of the Dirichlet partition")
    parser.add_argument("--min-size", type=int, default=2, help="fewest rows of a user of the Dirichlet partition")
    parser.add_argument("--rows-per-label", type=int, default=600, help="rows of each class of a user in `overlap`")
    parser.add_argument("--limit", type=int, default=0, help="training rows in `clusters`; 0 for all")
    parser.add_argument("--precision", default=common.fast_precision())
    parser.add_argument("--threads", type=int, default=1, help="of local training")
    parser.add_argument("--root", help="folder of the data; default: where the library looks")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--table", action="store_true", help="only write the Markdown from the JSON")
    options = parser.parse_args()
    for name, known in (
        ("parts", ("overlap", "clusters")),
        ("partitions", ("set2", "dirichlet")),
        ("similarities", SIMILARITIES),
    ):
        if unknown := set(getattr(options, name)) - set(known):
            parser.error(f"--{name} must be some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if odd := [users for users in options.clients if users % 5 and "set2" in options.partitions]:
        parser.error(f"--clients must be multiples of 5 for set2, got {odd}")
    return options


def main() -> None:
    """Computes what is missing, prints and writes."""
    options = parse()
    common.quiet()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "similarity_pa_cfl.json"
    if options.table:
        path.with_suffix(".md").write_text(markdown(json.loads(path.read_text())))
        return
    report = start_report(path, options)
    for cell in wanted(options):
        key = "/".join(str(value) for value in cell.values())
        known = report["cells"].get(key, {}).get("by", {})
        names = [name for name in options.similarities if name not in known]
        if not names:
            print(f"{key} exists, skipped")
            continue
        found = finish(cell, names, options)
        found["by"] = known | found["by"]
        report["cells"][key] = {
            **cell,
            "threads": options.threads,
            **found,
            "versions": common.versions(),
            "precision": options.precision,
        }
        save(report, path)
        print(f"{key}: {found['train_seconds']} s of training", flush=True)
        for name in names:
            row = found["by"][name]
            print("  ", name, {n: v for n, v in row.items() if n not in ("distances", "reason")}, flush=True)
    print(markdown(report))


if __name__ == "__main__":
    main()
