"""How time and memory of a round grow with the number of clients and with their rows, and what one client costs.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --clients 10,30,100 --rows 200,400,800 --backends InProcess

Synthetic rows of 64 features, ten classes, FedAvg with a small perceptron, one local epoch, batches of 32, one thread.
Clients: a growing number of clients with 32 rows each, so one step a round: what a client costs there is messages,
state, weights in and out, averaging, and that step. Rows: ten clients with a growing number of rows. Exponents are the
slopes of straight lines through the logarithms. Each point runs in a process of its own, whose peak memory is given
(without workers'); the first round is not counted, the median of the others is. Figures need an idle machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback

import fedclust
from lightning_modules import Classifier


class Times(Callback):
    """Seconds of every round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A round begins."""
        self._start = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A round ends."""
        self.seconds.append(time.perf_counter() - self._start)


def point(backend: str, clients: int, rows: int, rounds: int) -> dict[str, float]:
    """One measurement, in this process."""
    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    x = draw.random((clients * rows, 64), np.float32)
    y = draw.integers(0, 10, clients * rows)
    y[:10] = range(10)
    parts = [slice(client * rows, (client + 1) * rows) for client in range(clients)]
    source = [(x[part], y[part]) for part in parts]
    data = fedclust.FederatedDataModule(source, seed=0, val_fraction=0.0, test_fraction=0.0, scale="none")
    times = Times()
    trainer = pl.Trainer(
        max_epochs=rounds + 1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[times],
    )  # fmt: skip
    loop = fedclust.FederatedLoop(fedclust.FedAvg(1), Classifier("mlp", lr=0.1, batch_size=32), _backend(backend))
    trainer.fit(loop, datamodule=data)
    loop.backend.close()
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": median(times.seconds[1:]), "peak_mb": kilobytes / 1e3}


def _backend(name: str) -> Any:
    return getattr(fedclust, name)(threads=1)


def measure(backend: str, clients: int, rows: int, rounds: int) -> dict[str, float]:
    """One measurement, in a process of its own."""
    command = [sys.executable, __file__, "--point", backend, str(clients), str(rows), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{backend}, {clients} clients, {rows} rows: {done.stderr[-1500:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def exponent(sizes: list[int], values: list[float]) -> float:
    """Slope of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def markdown(report: dict[str, Any]) -> str:
    """The tables."""
    lines = ["# Scaling", "", (__doc__ or "").split("\n\n", 2)[2].strip(), "", f"Versions: {report['versions']}.", ""]
    for backend, both in report["backends"].items():
        for what, rows in both.items():
            sizes = [row["size"] for row in rows]
            slope = exponent(sizes, [row["seconds"] for row in rows])
            lines += [f"## {backend}, growing {what}: exponent of time {slope:.2f}", ""]
            lines += [f"| {what} | s/round | ms per client and round | peak MB |", "|---|---|---|---|"]
            for row in rows:
                shown = f"{row['seconds']:.3g} | {row['seconds'] / row['clients'] * 1e3:.2f} | {row['peak_mb']:.0f}"
                lines.append(f"| {row['size']} | {shown} |")
            lines.append("")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=common.integers, default=[10, 30, 100, 300, 1000])
    parser.add_argument("--rows", type=common.integers, default=[100, 300, 1000, 3000, 10000])
    parser.add_argument("--backends", type=common.words, default=["InProcess", "Processes", "Vectorised"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--point", nargs=4, metavar=("BACKEND", "CLIENTS", "ROWS", "ROUNDS"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measures, prints and writes."""
    options = parse()
    common.quiet()
    if options.point:
        backend, *numbers = options.point
        print(json.dumps(point(backend, *(int(number) for number in numbers))))
        return
    report: dict[str, Any] = {"versions": common.versions(), "backends": {}}
    for backend in options.backends:
        found: dict[str, list[dict[str, float]]] = {"clients": [], "rows": []}
        report["backends"][backend] = found
        cases = [("clients", size, size, 32) for size in options.clients]
        cases += [("rows", size, 10, size) for size in options.rows]
        for what, size, clients, rows in cases:
            row = {"size": size, "clients": clients, **measure(backend, clients, rows, options.rounds)}
            found[what].append(row)
            print(backend, what, row, flush=True)
            common.write_json(options.out / "scaling.json", report)
    (options.out / "scaling.md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
