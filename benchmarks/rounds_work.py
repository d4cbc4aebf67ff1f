"""One measurement of rounds.py in a process of its own: `python rounds_work.py SYSTEM TASK ROWS.npz ROUNDS PRECISION`.

Prints `ROUND n time` when a round begins, and once more at the end. Systems: InProcess, InProcess_2 (two threads),
Processes, Vectorised, bare, bare_2, Trainer, and products (the bare matrix products of the autoencoder's steps).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import common
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from rounds_models import (
    CLUST,
    CLUSTERS,
    GEOM,
    HIDDEN,
    LATENT,
    RECON,
    TASKS,
    Tensors,
    joined,
    loss_of,
    network,
    optimizer,
    read_rows,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedclust
from fedclust.algorithms.feddcn import FedDCNState
from lightning_modules import DCN, Classifier


def say(number: int) -> None:
    """Marks the beginning of a round."""
    print(f"ROUND {number} {time.time()}", flush=True)


def half(precision: str) -> AbstractContextManager[None]:
    """Autocast for bf16-mixed."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")


class Starts(Callback):
    """Marks the rounds of a federated loop."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A round begins."""
        say(trainer.current_epoch + 1)


class Prepared(fedclust.FedDCN):
    """FedDCN whose stages 1 and 2 are replaced by given rows: only the rounds are measured."""

    def __init__(self, extra: Tensors, **settings: Any) -> None:
        super().__init__(**settings)
        self.extra = extra

    def start(self, server: Any) -> FedDCNState:
        """The state before the first round."""
        extra = self.extra
        return FedDCNState(server.module.snapshot(), extra["centers"], extra["synthetic"], extra["geometry"])


def ours(system: str, task: str, rows: str, rounds: int, precision: str) -> None:
    """Rounds of the library, under a Trainer."""
    clients, extra = read_rows(rows)
    settings = TASKS[task]
    source = [(own["x"].numpy(), own["y"].numpy()) for own in clients]
    data = fedclust.FederatedDataModule(source, seed=0, val_fraction=0.0, test_fraction=0.0, scale="none")
    threads = 2 if system == "InProcess_2" else 1
    backend = getattr(fedclust, system.removesuffix("_2"))(threads=threads)
    algorithm: Any = fedclust.FedAvg(settings.epochs)
    client: Any = Classifier("mlp" if task == "tiny" else "cnn", lr=settings.lr, batch_size=settings.batch_size)
    if task == "feddcn":
        algorithm = Prepared(
            extra, recon_weight=RECON, cluster_weight=CLUST, geometry_federated=GEOM, round_epochs=settings.epochs,
            n_synthetic=len(extra["synthetic"]),
        )  # fmt: skip
        client = DCN(CLUSTERS, list(HIDDEN), LATENT, lr=settings.lr, batch_size=settings.batch_size, max_grad_norm=None)
    trainer = pl.Trainer(
        max_epochs=rounds, accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False,  # type: ignore[arg-type]
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Starts()],
    )  # fmt: skip
    trainer.fit(fedclust.FederatedLoop(algorithm, client, backend), datamodule=data)
    say(rounds + 1)
    backend.close()


def average(states: list[Tensors]) -> Tensors:
    """The mean of model states."""
    return {name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]}


def bare(task: str, rows: str, rounds: int, precision: str, threads: int) -> None:
    """The same work as one would write it by hand: one network, tensors in memory."""
    torch.set_num_threads(threads)
    (clients, extra), settings = read_rows(rows), TASKS[task]
    model = network(task)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for number in range(1, rounds + 1):
        say(number)
        found = []
        for own in clients:
            model.load_state_dict(state)
            model.train()
            steps = optimizer(task, model)
            for _ in range(settings.epochs):
                for part in torch.randperm(len(own["x"])).split(settings.batch_size):
                    batch = joined(task, {name: value[part] for name, value in own.items()}, extra)
                    steps.zero_grad()
                    with half(precision):
                        loss = loss_of(task, model, batch)
                    loss.backward()
                    steps.step()
            found.append({name: value.clone() for name, value in model.state_dict().items()})
        state = average(found)
    say(rounds + 1)


class Plain(pl.LightningModule):
    """The network and loss as a LightningModule."""

    def __init__(self, task: str, extra: Tensors) -> None:
        super().__init__()
        self.task, self.extra, self.model = task, extra, network(task)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """The loss."""
        return loss_of(self.task, self.model, joined(self.task, {"x": batch[0], "y": batch[1]}, self.extra))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The task's optimiser."""
        return optimizer(self.task, self.model)


def trainers(task: str, rows: str, rounds: int, precision: str) -> None:
    """One Trainer per client per round."""
    torch.set_num_threads(1)
    (clients, extra), settings = read_rows(rows), TASKS[task]
    module = Plain(task, extra)
    state = {name: value.clone() for name, value in module.model.state_dict().items()}
    for number in range(1, rounds + 1):
        say(number)
        found = []
        for own in clients:
            module.model.load_state_dict(state)
            loader = DataLoader(TensorDataset(own["x"], own["y"]), batch_size=settings.batch_size, shuffle=True)
            trainer = pl.Trainer(
                max_epochs=settings.epochs, accelerator="cpu", precision=precision, logger=False,  # type: ignore[arg-type]
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(module, loader)
            found.append({name: value.clone() for name, value in module.model.state_dict().items()})
        state = average(found)
    say(rounds + 1)


def products(rows: str, rounds: int, precision: str) -> None:
    """The matrix products of the autoencoder's steps alone: forward, and for weights and inputs backward."""
    torch.set_num_threads(1)
    (clients, _), settings = read_rows(rows), TASKS["feddcn"]
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    for number in range(1, rounds + 1):
        say(number)
        for own in clients:
            for size in _sizes(len(own["x"]), settings.batch_size) * settings.epochs:
                for run in _products(size, dtype):
                    run()
    say(rounds + 1)


def _sizes(n: int, batch_size: int) -> list[int]:
    return [min(batch_size, n - start) for start in range(0, n, batch_size)]


_KEPT: dict[tuple[int, torch.dtype], list[Callable[[], Any]]] = {}


def _products(size: int, dtype: torch.dtype) -> list[Callable[[], Any]]:
    """All products of one step on `size` real rows: 2 · size rows through both halves, size through the encoder."""
    if (size, dtype) not in _KEPT:
        _KEPT[size, dtype] = list(_make_products(size, dtype))
    return _KEPT[size, dtype]


def _make_products(size: int, dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    model: Any = network("feddcn")
    passes = [(2 * size, [*model["encoder"], *model["decoder"]]), (size, list(model["encoder"]))]
    for count, layers in passes:
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        for position, layer in enumerate(linear):
            x, weight = torch.rand(count, layer.in_features).to(dtype), layer.weight.detach().to(dtype)
            grad = torch.rand(count, layer.out_features).to(dtype)
            yield lambda x=x, weight=weight: x @ weight.t()
            yield lambda x=x, grad=grad: grad.t() @ x
            if position:  # the rows themselves need no gradient
                yield lambda weight=weight, grad=grad: grad @ weight


def main() -> None:
    """Runs one measurement."""
    system, task, rows, rounds, precision = sys.argv[1:]
    common.quiet()
    if system == "products":
        products(rows, int(rounds), precision)
    elif system.startswith("bare"):
        bare(task, rows, int(rounds), precision, 2 if system == "bare_2" else 1)
    elif system == "Trainer":
        trainers(task, rows, int(rounds), precision)
    else:
        ours(system, task, rows, int(rounds), precision)


if __name__ == "__main__":
    main()
