"""Seconds per round of many tiny clients: one after the other, and trained together.

    python benchmarks/tiny_clients.py [--clients 100] [--rows 20] [--epochs 5] [--rounds 5] [--threads 1]
    python benchmarks/tiny_clients.py --clients 4 --epochs 1 --rounds 1

One round is one `update` of every client (FedAvg's local epochs of a small classifier on rows of 64 features); the
backends take turns, and the median over the rounds counts. Prints JSON with the machine's load beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from statistics import median

import numpy as np
import torch

import fedclust
from fedclust.federation.backend import Backend
from fedclust.federation.message import with_prefix
from lightning_modules import Classifier

FEATURES, CLASSES = 64, 10


def connected(backend: Backend, options: argparse.Namespace) -> Backend:
    """A backend over clients of random rows."""
    draw = np.random.default_rng(0)
    rows = [
        (draw.random((options.rows, FEATURES), np.float32), np.arange(options.rows) % CLASSES)
        for _ in range(options.clients)
    ]
    data = fedclust.FederatedDataModule(rows, seed=0, val_fraction=0.0, test_fraction=0.0)
    module = Classifier("mlp", lr=0.05, batch_size=options.batch_size)
    module.build(data.input_shape, data.n_classes)
    module.initialize(0)
    backend.connect(module, data, seed=0, device=torch.device("cpu"), precision="32-true")
    return backend


def one_round(backend: Backend, number: int, epochs: int) -> tuple[float, float]:
    """Seconds, and CPU seconds, of one round."""
    backend.round = number
    weights = with_prefix("weights", backend.module.snapshot())
    start, cpu = time.perf_counter(), time.process_time()
    everyone = {client: {} for client in range(backend.data.n_clients)}
    backend.ask("update", everyone, shared={**weights, "epochs": epochs}, on_reply=lambda client, reply: None)
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("clients", 100), ("rows", 20), ("epochs", 5), ("batch-size", 10), ("rounds", 5),
                          ("threads", 1), ("per-batch", 32)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    backends = {
        "InProcess": connected(fedclust.InProcess(options.threads), options),
        "Vectorised": connected(fedclust.Vectorised(options.per_batch, options.threads), options),
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in backends}
    for number in range(options.rounds + 1):
        for name, backend in backends.items():
            both = one_round(backend, number, options.epochs)
            if number:  # the first one makes copies and warms caches
                spent[name].append(both)
    report: dict[str, object] = {}
    for place, what in enumerate(("seconds", "cpu_seconds")):
        medians = {name: median(both[place] for both in values) for name, values in spent.items()}
        report[what] = {name: round(value, 4) for name, value in medians.items()}
        report[f"{what}_ratio"] = round(medians["InProcess"] / medians["Vectorised"], 2)
    print(json.dumps({**report, "load": os.getloadavg(), **vars(options)}))


if __name__ == "__main__":
    main()
