"""FLAMECHE's grouping on rotated Fashion-MNIST: how soon it is right, what it costs, what protected sums change.

    python benchmarks/flameche.py                         # N = 20, 100, 500; participation 1, .5, .2; two seeds
    python benchmarks/flameche.py --clients 20 --modes plain_1,secure_sum,ckks --participation 1 --seeds 0
    python benchmarks/flameche.py --dataset digits --network small_cnn --clients 8 --rounds 3 --out /tmp/try

Four planted groups: images rotated by 0, 90, 180, 270 degrees, rows dealt at random. Metadata only, no model is trained
(round_epochs = 0). LeNet-5's 84 random features, so metadata are 10 × 84 numbers. Modes: plain has five starts side by
side, plain_1, secure_sum and ckks have one.

ari: adjusted Rand index of the seen clients' groups after the last round. right from: first round from which on all
clients are seen and grouped as planted, or "-". bytes: per client and round that it took part in, both directions.
deviation: largest absolute difference of a centroid to plain_1 in the same cell. The secure modes regroup only clients
of the round, and hold back moves after which a client's metadata would follow from the sums, so their groups may differ
from plain ones; deviation is given where they do not. seen: clients with a group after the last round. held: rounds in
which moves were held back.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import common
import pytorch_lightning as pl
import torch

from fedclust import FLAMECHE, FederatedDataModule, FederatedLoop, Iid, InProcess, Rotations
from lightning_modules import FLAMECHEClient

Run = dict[str, Any]


class Curve(pl.Callback):
    """Adjusted Rand index and clients seen, round by round."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Takes one round's figures."""
        assert isinstance(module, FederatedLoop)
        self.rounds.append((module.latest["clients/ari"], module.latest["clients/seen"]))


def one(clients: int, participation: float, mode: str, seed: int, options: argparse.Namespace) -> tuple[Run, Any]:
    """One run and its centroids."""
    data = FederatedDataModule(
        options.dataset, Iid(clients), root=options.root, transform=Rotations(), seed=seed, val_fraction=0.0
    )
    algorithm = FLAMECHE(
        4, round_epochs=0, n_init=options.starts if mode == "plain" else 1, recluster_every=options.tau,
        aggregation=mode.removesuffix("_1"),
    )  # fmt: skip
    loop = FederatedLoop(algorithm, FLAMECHEClient(options.network), InProcess(), participation=participation)
    curve = Curve()
    trainer = pl.Trainer(
        max_epochs=options.rounds, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[curve],
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    start = time.perf_counter()
    trainer.fit(loop, datamodule=data)
    seconds = time.perf_counter() - start
    counts = loop.byte_counts()
    asked = sum(len(loop.cohorts.draw(loop.server.clients, seed, number + 1)) for number in range(options.rounds))
    right = [ari == 1.0 and seen == clients for ari, seen in curve.rounds]
    first = next((number + 1 for number in range(len(right)) if all(right[number:])), None)
    found = {
        "clients": clients, "participation": participation, "mode": mode, "seed": seed,
        "ari": round(curve.rounds[-1][0], 4), "seen": int(curve.rounds[-1][1]), "right_from": first,
        "bytes_up": sum(both["up"] for both in counts.values()) / asked,
        "bytes_down": sum(both["down"] for both in counts.values()) / asked,
        "seconds": round(seconds, 2), "seconds_per_round": round(loop.seconds["cluster"] / options.rounds, 3),
        "held": len({note.split(":")[0] for note in loop.notes if "keep the clusters" in note}),
        "curve": [round(ari, 4) for ari, _ in curve.rounds], "notes": loop.notes,
    }  # fmt: skip
    return found, (loop.state.slots, loop.state.parameters)


def cell(clients: int, participation: float, seed: int, options: argparse.Namespace) -> list[Run]:
    """All modes of one cell; the protected ones against the plain one."""
    rows, plain = [], None
    for mode in options.modes:
        row, (slots, parameters) = one(clients, participation, mode, seed, options)
        if mode == "plain_1":
            plain = (slots, parameters)
        elif plain is not None and torch.equal(plain[0], slots):
            row["deviation"] = float((plain[1] - parameters).abs().max())
        rows.append(row)
        print({name: row[name] for name in row if name not in ("curve", "notes")}, flush=True)
    return rows


def markdown(report: dict[str, Any]) -> str:
    """The table."""
    columns = (
        "clients", "participation", "mode", "seed", "ari", "seen", "held", "right from", "bytes up", "bytes down",
        "s a round",
    )  # fmt: skip
    lines = [
        "# FLAMECHE: grouping by rotation", "", (__doc__ or "").split("\n\n", 2)[2].strip(), "",
        f"Settings: {report['settings']}. Commit {report['versions']['commit']}.", "",
        *common.heading([*columns, "deviation"]),
    ]  # fmt: skip
    for row in report["rows"]:
        deviation = f"{row['deviation']:.1e}" if "deviation" in row else ""
        cells = (
            row["clients"], row["participation"], row["mode"], row["seed"], f"{row['ari']:.3f}",
            row["seen"], row["held"],
            row["right_from"] or "-", f"{row['bytes_up']:,.0f}", f"{row['bytes_down']:,.0f}",
            f"{row['seconds_per_round']:.2f}", deviation,
        )  # fmt: skip
        lines.append(common.row(cells))
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion_mnist")
    parser.add_argument("--network", default="lenet5")
    parser.add_argument("--clients", type=common.integers, default=[20, 100, 500])
    parser.add_argument("--participation", type=common.decimals, default=[1.0, 0.5, 0.2])
    parser.add_argument("--modes", type=common.words, default=["plain", "plain_1", "secure_sum"])
    parser.add_argument("--seeds", type=common.integers, default=[0, 1])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--starts", type=int, default=5, help="of plain")
    parser.add_argument("--tau", type=int, default=2, help="rounds between re-clusterings")
    parser.add_argument("--name", default="flameche", help="stem of the files")
    parser.add_argument("--root", help="folder of the data; default: where the library looks")
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    return parser.parse_args()


def main() -> None:
    """Runs, prints and writes."""
    options = parse()
    common.quiet()
    torch.set_num_threads(1)
    settings = {name: getattr(options, name) for name in ("dataset", "network", "rounds", "starts", "tau")}
    report: dict[str, Any] = {"settings": settings, "versions": common.versions(), "rows": []}
    for clients in options.clients:
        for participation in options.participation:
            for seed in options.seeds:
                report["rows"] += cell(clients, participation, seed, options)
                common.write_json(options.out / f"{options.name}.json", report)
    (options.out / f"{options.name}.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
