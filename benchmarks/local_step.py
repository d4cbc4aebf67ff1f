"""What two choices are worth per local step on a CPU: freed memory kept by the process, and pooling before the ReLU.

    python benchmarks/local_step.py
    python benchmarks/local_step.py --turns 1 --rows 64 --epochs 1

The autoencoder of FedDCN (its local epoch of stage 3, see profile_feddcn.py) and the CNN of PA-CFL (batches of 64) are
trained on random rows by one thread. Memory is handed back to the system by default of glibc and cannot be unset once
it is kept, so every variant runs in processes of its own, in turn; the least CPU time per step counts, as load from
outside only ever adds. Prints and writes a table.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import common
import torch
from feddcn_cells import settings
from profile_feddcn import LocalStep
from torch import nn

from fedclust.federation import context
from fedclust.federation.batches import shuffled_batches
from fedclust.federation.context import WorkContext, make_fabric
from lightning_modules import Classifier

# Task, whether freed memory is kept, whether the ReLU stands before the pooling.
VARIANTS = {
    "autoencoder, memory handed back": ("autoencoder", False, False),
    "autoencoder": ("autoencoder", True, False),
    "CNN, memory handed back": ("cnn", False, False),
    "CNN, ReLU before pooling": ("cnn", True, True),
    "CNN": ("cnn", True, False),
}


def relu_first(network: nn.Sequential) -> nn.Sequential:
    """The same layers with every ReLU before the pooling that it follows."""
    layers = list(network)
    for place, (layer, following) in enumerate(pairwise(network)):
        if isinstance(layer, nn.MaxPool2d) and isinstance(following, nn.ReLU):
            layers[place : place + 2] = [following, layer]
    return nn.Sequential(*layers)


def cnn_epoch(rows: int, precision: str, swapped: bool) -> Callable[[], int]:
    """One epoch of the CNN over images of 28 × 28; returns the number of steps."""
    module = Classifier("cnn", lr=0.01, batch_size=64)
    module.build((1, 28, 28), 10)
    module.initialize(0)
    if swapped:
        module.network = relu_first(module.network).to(memory_format=torch.channels_last)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(rows, 1, 28, 28, generator=draw), torch.randint(10, (rows,), generator=draw)
    ctx = WorkContext("client 0", 1, 0, make_fabric(torch.device("cpu"), precision))

    def batches(_: int) -> Iterator[dict[str, torch.Tensor]]:
        return ({"x": x[rows], "y": y[rows]} for rows in shuffled_batches(len(x), 64, ctx.rng("batches")))

    return lambda: module.fit_locally(ctx, 1, batches=batches).n_steps


def autoencoder_epoch(rows: int, precision: str) -> Callable[[], int]:
    """One epoch of stage 3 of FedDCN; returns the number of steps."""
    arguments = settings("fashion_mnist", "iid")["model"]["init_args"]
    step = LocalStep(arguments["client"]["init_args"], arguments["algorithm"]["init_args"], 784, rows, precision)
    return step.library


def measured(variant: str, rows: int, epochs: int) -> dict[str, float]:
    """CPU milliseconds, wall milliseconds and page faults per step of one variant in this process."""
    task, kept, swapped = VARIANTS[variant]
    if not kept:
        context.keep_freed_memory = lambda: False
    torch.set_num_threads(1)
    precision = common.fast_precision()
    epoch = cnn_epoch(rows, precision, swapped) if task == "cnn" else autoencoder_epoch(rows, precision)
    epoch()
    faults, cpu, wall = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time(), time.perf_counter()
    steps = sum(epoch() for _ in range(epochs))
    spent = (time.process_time() - cpu, time.perf_counter() - wall)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return {"cpu_ms": spent[0] / steps * 1e3, "wall_ms": spent[1] / steps * 1e3, "page_faults": faults / steps}


def in_a_process(variant: str, options: argparse.Namespace) -> dict[str, float]:
    """`measured` in a fresh process."""
    command = [
        sys.executable,
        __file__,
        "--point",
        variant,
        "--rows",
        str(options.rows),
        "--epochs",
        str(options.epochs),
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(printed.splitlines()[-1])


def table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    lines = ["| local step | CPU ms | wall ms | page faults |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {row['cpu_ms']:.2f} | {row['wall_ms']:.2f} | {row['page_faults']:.0f} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, default=6400)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--point", choices=tuple(VARIANTS), help="only this one, in this process")
    options = parser.parse_args()
    common.quiet()
    if options.point:
        print(json.dumps(measured(options.point, options.rows, options.epochs)))
        return
    machine = common.machine()
    turns = [{name: in_a_process(name, options) for name in VARIANTS} for _ in range(options.turns)]
    best = {name: min((turn[name] for turn in turns), key=lambda row: row["cpu_ms"]) for name in VARIANTS}
    print(table(best))
    record = {"precision": common.fast_precision(), "machine": machine, "versions": common.versions(), "rows": best}
    common.write_json(options.out / "local_step.json", record)
    (options.out / "local_step.md").write_text(
        f"One thread, {record['precision']}, least of {options.turns} processes each.\n\n{table(best)}"
    )


if __name__ == "__main__":
    main()
