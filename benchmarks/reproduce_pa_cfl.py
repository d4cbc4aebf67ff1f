"""PA-CFL beside the paper's Table 2: one JSON per run and a Markdown table.

    python benchmarks/reproduce_pa_cfl.py --dataset fashion_mnist --partition set2 --rows no_privacy --seeds 0,1
    python benchmarks/reproduce_pa_cfl.py --dataset fashion_mnist --partition set2 --rows all_three --epsilon 1,1e2,1e3
    python benchmarks/reproduce_pa_cfl.py --dataset mnist --partition dirichlet_0.1 --similarity index_overlap
    python benchmarks/reproduce_pa_cfl.py --dataset digits --partition set2 --clients 5 --rounds 1 --out /tmp/try
    python benchmarks/reproduce_pa_cfl.py --table

Rows: the six of Table 2, and FedAvg and LocalOnly with the same network and local epochs. Rates, batches and rounds are
the paper's for the data set unless given. A file's name shows every argument that is not at its default and matters for
its row (a row without privacy has no ε₀). Runs whose JSON exists are skipped; an interrupted run goes on from its last
round (its checkpoints lie under --work).

The headline is the test accuracy after the last round, a number of rounds fixed beforehand as in the paper. Beside it
stands the test accuracy at the best round by validation accuracy. Test rows are measured every few rounds, at such best
rounds and at the last one, and choose nothing. A run whose models stop being finite numbers ends there and says so.

Noise comes from the run's seed by default so that runs repeat: it is distributed as the secure noise but protects
nobody. The ε of the JSONs is that of the mechanism with secure noise, and speaks of the less important part only.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import common
import pytorch_lightning as pl
from common import RESULTS, WORK
from pa_cfl_cells import BATCH_SIZE, DEFAULTS, LR, METHODS, PARTITIONS, ROUNDS, Cell
from pa_cfl_table import write_table

from fedclust import FederatedLoop, InProcess
from fedclust.algorithms.pa_cfl import PrivateAdaptiveState
from fedclust.clustering.distances import GRADIENT_METRICS, SEQUENCE_METRICS
from fedclust.federation.errors import ClientError, NonFiniteError
from fedclust.privacy.ledger import Ledger

TEST_FIGURES = ("acc_mean", "acc_worst", "acc_pooled", "f1_macro", "auc")


@dataclass
class History(pl.Callback):
    """Keeps every round's metrics; measures the test rows where they are reported."""

    test_every: int
    rounds: int
    rows: list[dict[str, float]] = field(default_factory=list)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Takes one round's metrics."""
        assert isinstance(module, FederatedLoop)
        row: dict[str, float] = {"round": trainer.current_epoch + 1, **module.latest}
        improved = not self.rows or row["val/acc_mean"] > self.best()["val/acc_mean"]
        if improved or row["round"] % self.test_every == 0 or row["round"] == self.rounds:
            with module.server.stage("test"):
                test = module.algorithm.evaluate(module.state, module.server, "test")
            row |= {f"test/{name}": value for name, value in test.items()}
        self.rows.append(row)
        shown = ("round", "val/acc_mean", "test/acc_mean", "clusters/final", "clients/ari", "seconds/round")
        print({name: round(row[name], 4) for name in shown if name in row}, flush=True)

    def best(self) -> dict[str, float]:
        """The first round with the best mean validation accuracy."""
        return max(self.rows, key=lambda row: row["val/acc_mean"])

    def state_dict(self) -> dict[str, Any]:
        """Rounds so far, for a run that is interrupted."""
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.rows = [dict(row) for row in state_dict["rows"]]


def run(cell: Cell, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One run; returns what its JSON holds."""
    made_with = {"versions": common.versions(), "machine": common.machine()}  # before anybody commits or starts more
    data = cell.data(options.root)
    loop = FederatedLoop(cell.algorithm(), cell.client(), InProcess(threads=cell.options["threads"]))
    history = History(options.test_every, cell.rounds)
    trainer = common.make_trainer(cell.rounds, cell.options["precision"], work, [history])
    diverged = None
    try:
        trainer.fit(loop, datamodule=data, ckpt_path=common.checkpoint_in(work))
    except ClientError as error:
        if not not_finite(error):
            raise
        diverged = {"round": error.failure.round, "error": str(error)}
    if diverged is None and len(history.rows) < cell.rounds:
        raise SystemExit(f"interrupted after {len(history.rows)} of {cell.rounds} rounds; run it again to go on")
    return {
        "dataset": cell.dataset, "partition": cell.partition, "row": cell.row, "rounds": cell.rounds,
        "seed": cell.seed, "varied": cell.varied(), **outcome(history.rows, diverged),
        "privacy": privacy(loop), "groups": groups(loop, data),
        "seconds": round(sum(loop.seconds.values()), 1),
        "stages": {name: round(value, 2) for name, value in loop.seconds.items()},
        "settings": cell.settings(), "rows_per_user": data.n_rows, "bytes": loop.byte_counts(),
        "notes": loop.notes, **made_with, "history": history.rows,
    }  # fmt: skip


def not_finite(error: ClientError) -> bool:
    """Whether a client failed because its model, or its gradient, is no longer made of finite numbers."""
    overflow = r"ValueError: client \d+: \d+ of \d+ coordinates are NaN or infinite"  # of `top_k_indices`
    return isinstance(error.__cause__, NonFiniteError) or re.fullmatch(overflow, error.failure.message) is not None


def outcome(rows: list[dict[str, float]], diverged: dict[str, Any] | None) -> dict[str, Any]:
    """Test figures after the last round (none if the run diverged) and at the best round by validation accuracy."""
    found: dict[str, Any] = {"diverged": diverged, "final": None, "best_by_val": None}
    if rows and diverged is None:
        found["final"] = figures(rows[-1])
    if rows:
        best = max(rows, key=lambda row: row["val/acc_mean"])
        found["best_by_val"] = {**figures(best), "val_acc_mean": best["val/acc_mean"]}
    return found


def figures(row: dict[str, float]) -> dict[str, float]:
    """The test figures of one round; the area under the ROC only where it is defined."""
    test = {name: row[f"test/{name}"] for name in TEST_FIGURES if f"test/{name}" in row}
    return {"round": row["round"], **test}


def privacy(loop: FederatedLoop) -> dict[str, Any] | None:
    """All bounds of the worst user, for the last round and for all rounds, the smallest named; None without noise."""
    state = loop.state
    if not isinstance(state, PrivateAdaptiveState) or not len(state.ledger["rounds"]):
        return None
    ledger = Ledger(loop.algorithm.delta)
    ledger.load_state(state.ledger)
    found: dict[str, Any] = {"rounds": ledger.n_rounds}
    for name, statement in (("round", ledger.worst_round()), ("total", ledger.worst_total())):
        bounds = {b.name: {**vars(b), "vacuous": b.vacuous} for b in statement.bounds}
        found[name] = {"smallest": statement.smallest.name, "epsilon": statement.epsilon, "delta": statement.delta}
        found[name] |= {"user": statement.user, "bounds": bounds}
    return found | {"covered": statement.covered, "not_covered": statement.not_covered}


def groups(loop: FederatedLoop, data: pl.LightningDataModule) -> dict[str, list[int]] | None:
    """Planted group, pre-cluster and final cluster of every user after the last round."""
    if not isinstance(loop.state, PrivateAdaptiveState):
        return None
    found = {"pre": loop.state.pre_clusters.tolist(), "final": loop.state.clusters.tolist()}
    return found if data.groups is None else {"planted": data.groups.tolist(), **found}


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=tuple(ROUNDS))
    parser.add_argument("--partition", choices=PARTITIONS)
    parser.add_argument(
        "--rows", type=common.words, default=list(METHODS), help=f"some of {','.join(METHODS)}; default: all"
    )
    parser.add_argument("--rounds", type=int, help=f"default by data set: {ROUNDS}")
    parser.add_argument("--seeds", type=common.integers, default=[0])
    parser.add_argument("--clients", type=int, default=DEFAULTS["clients"])
    similarities = (*SEQUENCE_METRICS, *GRADIENT_METRICS)
    parser.add_argument("--similarity", choices=similarities, default=DEFAULTS["similarity"])
    parser.add_argument("--epsilon", type=common.decimals, default=[DEFAULTS["epsilon"]], help="ε₀, one or a list")
    period = lambda text: None if text == "none" else int(text)  # noqa: E731
    parser.add_argument("--sync-period", type=period, default=DEFAULTS["sync_period"], help="κ, or none")
    parser.add_argument("--global-step", choices=("unit", "mean_norm"), default=DEFAULTS["global_step"])
    parser.add_argument("--noise", choices=("simulated", "secure"), default=DEFAULTS["noise"],
                        help="simulated noise repeats with the seed and protects nobody")  # fmt: skip
    parser.add_argument("--precision", default=common.fast_precision())
    parser.add_argument("--threads", type=int, default=DEFAULTS["threads"])
    parser.add_argument("--lr", type=float, help=f"default by data set: {LR}")
    parser.add_argument("--batch-size", type=int, help=f"default by data set: {BATCH_SIZE}")
    parser.add_argument("--round-epochs", type=int, default=DEFAULTS["round_epochs"])
    parser.add_argument("--test-every", type=int, default=5, help="rounds between test figures of the curve")
    parser.add_argument("--root", help="folder of the data; default: where the library looks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=WORK, help="checkpoints of unfinished runs")
    parser.add_argument("--table", action="store_true", help="only write the table from the JSONs")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(METHODS):
        parser.error(f"--rows must be some of {', '.join(METHODS)}, got {', '.join(sorted(unknown))}")
    if not options.table and (options.dataset is None or options.partition is None):
        parser.error("--dataset and --partition are needed, or --table")
    return options


def cells(options: argparse.Namespace) -> list[Cell]:
    """The runs asked for, each once: a list of ε₀ does not repeat rows without noise."""
    given = {name: getattr(options, name) for name in (*DEFAULTS, "precision") if name != "epsilon"}
    given |= {"lr": options.lr or LR[options.dataset], "batch_size": options.batch_size or BATCH_SIZE[options.dataset]}
    rounds = options.rounds or ROUNDS[options.dataset]
    found: dict[str, Cell] = {}
    for seed in options.seeds:
        for row in options.rows:
            for epsilon in options.epsilon:
                cell = Cell(options.dataset, options.partition, row, rounds, seed, {**given, "epsilon": epsilon})
                found.setdefault(cell.name, cell)
    return list(found.values())


def main() -> None:
    """Runs what was asked for and writes the table."""
    options = parse()
    common.quiet()
    options.out.mkdir(parents=True, exist_ok=True)
    for cell in [] if options.table else cells(options):
        print(cell.name, flush=True)
        path = options.out / f"{cell.name}.json"
        result = common.run_once(path, options.work, partial(run, cell, options))
        if result is not None:
            end = result["diverged"] or {name: round(value, 4) for name, value in result["final"].items()}
            print(f"{path.name}: {end} in {result['seconds']} s", flush=True)
    print(write_table(options.out))


if __name__ == "__main__":
    main()
