"""How much of FedDCN's accuracy is the luck of k-means: other optima in the same latent space.

    python benchmarks/feddcn_optima.py --dataset mnist --scenario iid --seed 2 --checkpoint RUN/last.ckpt

Runs k-means on the training rows' latents from several starts and prints and writes, beside the federation's own
centres, each optimum's inertia and the test figures that it would give. `reproduce_feddcn.py` keeps the same for its
last round in its JSONs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common
import torch
from feddcn_cells import make_data

from fedclust import FederatedDataModule, load
from fedclust.clustering.kmeans import assign, kmeans, squared_distances
from fedclust.metrics import contingency_table, scores_from_contingency
from lightning_modules import DCN


def optima(module: DCN, data: FederatedDataModule, starts: int = 10) -> list[dict[str, Any]]:
    """The federation's centres and those of k-means from single starts: inertia on train rows, ACC and NMI on test."""
    train, test = module.latents(data.train.x), module.latents(data.test.x)
    found = [("federation", module.centers.detach())]
    found += [
        (f"start {seed}", kmeans(train, module.n_clusters, n_init=1, seed=seed).centers) for seed in range(starts)
    ]
    return [{"centres": name, **_figures(centers, train, test, data)} for name, centers in found]


def _figures(
    centers: torch.Tensor, train: torch.Tensor, test: torch.Tensor, data: FederatedDataModule
) -> dict[str, float]:  # fmt: skip
    assert data.n_classes is not None
    assert data.test.y is not None
    inertia = float(squared_distances(train.double(), centers.double()).min(dim=1).values.sum())
    labels = assign(test, centers)
    table = contingency_table(data.test.y.numpy(), labels.numpy(), data.n_classes, len(centers))
    scores = scores_from_contingency(table)
    return {"inertia": round(inertia, 1), "acc": round(scores["acc"], 4), "nmi": round(scores["nmi"], 4)}


def main() -> None:
    """Prints the optima of one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("mnist", "fashion_mnist", "usps", "digits"), required=True)
    parser.add_argument("--scenario", choices=("iid", "noniid"), default="noniid")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    module: Any = load(options.checkpoint).module
    rounds = torch.load(options.checkpoint, map_location="cpu", weights_only=True)["global_step"]
    name = f"feddcn_optima_{options.dataset}_{options.scenario}_{options.clients}_{options.seed}.md"
    text = _table(options, rounds, optima(module, make_data(options, options.seed)))
    (options.out / name).write_text(text)
    print(text)


def _table(options: argparse.Namespace, rounds: int, rows: list[dict[str, Any]]) -> str:
    lines = [
        f"# Optima of k-means in FedDCN's latent space: {options.dataset}, {options.scenario}, seed {options.seed}",
        "",
        f"After round {rounds}; k-means on the training rows' latents, one start each; ACC and NMI on the test split.",
        "Written by `python benchmarks/feddcn_optima.py`.",
        "",
        "| centres | inertia | ACC | NMI |",
        "|---|---|---|---|",
        *(f"| {row['centres']} | {row['inertia']} | {row['acc']:.4f} | {row['nmi']:.4f} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
