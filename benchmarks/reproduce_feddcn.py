"""FedDCN beside the paper's Table II: one JSON per run and a Markdown table.

    python benchmarks/reproduce_feddcn.py --dataset fashion_mnist --scenario iid --clients 5 --seeds 0,1
    python benchmarks/reproduce_feddcn.py --dataset fashion_mnist --scenario iid --variant no_geometry --seeds 0
    python benchmarks/reproduce_feddcn.py --table

Settings are those of configs/feddcn_<dataset>_<scenario>.yaml (the paper's Table IV). Runs whose JSON exists are
skipped; an interrupted run goes on from its last round (its checkpoints lie under --work).

A run stops when its label-free monitor (validation Davies-Bouldin) has not gained for 15 rounds. Beside it the best
round by validation accuracy among the rounds run, with the same patience, is reported: that monitor uses labels, as the
paper did. For each monitor the figures are the test split's at that monitor's best round; the test split is measured
every round but chooses nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import common
import pytorch_lightning as pl
from common import RESULTS, WORK
from feddcn_cells import make_data, settings
from feddcn_optima import optima
from feddcn_table import write_table

from fedclust import FedDCN, FederatedLoop, InProcess
from lightning_modules import DCN

VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "no_geometry": {"geometry_pretrain": 0.0, "geometry_federated": 0.0},
    "no_augmentation": {"augment": False},
    "isotropic_within_sigma": {"sampling": "isotropic", "counts": "within_sigma"},
    "isotropic_assigned": {"sampling": "isotropic", "counts": "assigned"},
    "diagonal_within_sigma": {"sampling": "diagonal", "counts": "within_sigma"},
    "diagonal_assigned": {"sampling": "diagonal", "counts": "assigned"},
}


@dataclass
class Monitor:
    """One stopping rule: the best value so far, when it was reached, and whether patience ran out."""

    name: str
    sign: int
    patience: int
    best: float = float("-inf")
    best_round: int = 0
    stopped: int | None = None

    def update(self, round: int, value: float) -> None:
        """Takes the value of one round."""
        if self.stopped is not None:
            return
        if self.sign * value > self.best:
            self.best, self.best_round = self.sign * value, round
        elif round - self.best_round >= self.patience:
            self.stopped = round


@dataclass
class History(pl.Callback):
    """Keeps validation and test metrics of every round and ends the run when its first monitor has stopped."""

    monitors: list[Monitor]
    rows: list[dict[str, float]] = field(default_factory=list)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Measures the test split and updates the monitors."""
        assert isinstance(module, FederatedLoop)
        test = module.algorithm.evaluate(module.state, module.server, "test")
        row = {"round": trainer.current_epoch + 1, **module.latest}
        row |= {f"test/{name}": value for name, value in test.items()}
        self.rows.append(row)
        for monitor in self.monitors:
            monitor.update(int(row["round"]), row[monitor.name])
        shown = ("round", "val/dbi", "val/acc", "test/acc", "test/nmi", "seconds/round")
        print({name: round(row[name], 4) for name in shown}, flush=True)
        if self.monitors[0].stopped is not None:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Rounds so far, for a run that is interrupted."""
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.rows = [dict(row) for row in state_dict["rows"]]
        for row in self.rows:
            for monitor in self.monitors:
                monitor.update(int(row["round"]), row[monitor.name])


def run(options: argparse.Namespace, seed: int, work: Path) -> dict[str, Any]:
    """One run; returns what its JSON holds."""
    config = settings(options.dataset, options.scenario)
    loop_args = config["model"]["init_args"]
    algorithm = {**loop_args["algorithm"]["init_args"], **VARIANTS[options.variant]}
    rounds = options.rounds or config["trainer"]["max_epochs"]
    data = make_data(options, seed)
    module = DCN(**loop_args["client"]["init_args"])
    loop = FederatedLoop(FedDCN(**algorithm), module, InProcess(threads=options.threads))
    free = Monitor("val/dbi", -1, options.patience)
    labelled = Monitor("val/acc", +1, options.patience)
    history = History([free, labelled])
    trainer = common.make_trainer(rounds, options.precision, work, [history])
    trainer.fit(loop, datamodule=data, ckpt_path=common.checkpoint_in(work))
    seconds = sum(loop.seconds.values())
    loop.algorithm.module_for(loop.state, module)
    return {
        "dataset": options.dataset, "scenario": options.scenario, "clients": options.clients,
        "variant": options.variant, "seed": seed, **chosen(history, free, uses_labels=False),
        "label_based": chosen(history, labelled, uses_labels=True), "rounds_run": len(history.rows),
        "seconds": round(seconds, 1), "stages": {name: round(value, 1) for name, value in loop.seconds.items()},
        "precision": options.precision, "threads": options.threads, "algorithm": algorithm,
        "client": loop_args["client"]["init_args"], "partition": data.partition.describe()["args"],
        "optima": optima(module, data), "bytes": loop.byte_counts(),
        "notes": loop.notes, "versions": versions(), "history": history.rows,
    }  # fmt: skip


def chosen(history: History, monitor: Monitor, uses_labels: bool) -> dict[str, Any]:
    """Test figures at the monitor's best round."""
    row = history.rows[monitor.best_round - 1]
    figures = {name: round(row[f"test/{name}"], 4) for name in ("acc", "nmi", "ari", "dbi", "recon")}
    last = monitor.stopped or len(history.rows)
    return {**figures, "best_round": monitor.best_round, "rounds": last, "monitor": monitor.name,
            "uses_labels": uses_labels}  # fmt: skip


def versions() -> dict[str, str | None]:
    """Versions of what the figures depend on, and the commit."""
    return common.versions(("torch", "pytorch-lightning", "numpy", "scikit-learn", "umap-learn"))


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=("mnist", "fashion_mnist", "usps", "digits"))
    parser.add_argument("--scenario", choices=("iid", "noniid"), default="noniid")
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="paper")
    parser.add_argument("--rounds", type=int, help="rounds at most; default: the configuration's")
    parser.add_argument("--patience", type=int, default=15)
    parser.add_argument("--precision", default=common.fast_precision())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--root", help="folder of the data; default: where the library looks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=WORK, help="checkpoints of unfinished runs")
    parser.add_argument("--table", action="store_true", help="only write the table from the JSONs")
    return parser.parse_args()


def main() -> None:
    """Runs what was asked for and writes the table."""
    options = parse()
    common.quiet()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.table:
        if options.dataset is None:
            raise SystemExit("--dataset is needed, or --table")
        for seed in (int(part) for part in options.seeds.split(",")):
            name = f"feddcn_{options.dataset}_{options.scenario}_{options.clients}_{options.variant}_{seed}.json"
            result = common.run_once(options.out / name, options.work, partial(run, options, seed))
            if result is not None:
                print(f"{name}: acc {result['acc']} nmi {result['nmi']} in {result['seconds']} s", flush=True)
    print(write_table(options.out))


if __name__ == "__main__":
    main()
