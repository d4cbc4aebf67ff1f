"""The work of rounds.py in plain PyTorch, for the peers: networks, losses, optimisers and rows of the three tasks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        clients: Number of clients.
        epochs: Local epochs in a round.
        batch_size: Rows per batch.
        lr: Learning rate.
    """

    clients: int
    epochs: int
    batch_size: int
    lr: float


TASKS = {
    "feddcn": Task(clients=5, epochs=5, batch_size=256, lr=1e-4),
    "cnn": Task(clients=20, epochs=1, batch_size=64, lr=0.01),
    "tiny": Task(clients=100, epochs=1, batch_size=16, lr=0.1),
}
HIDDEN, LATENT, CLUSTERS = (512, 256), 6, 10
RECON, CLUST, GEOM = 0.3225, 0.0005, 0.0008


def autoencoder() -> nn.ModuleDict:
    """784-512-256-6 with BatchNorm and ReLU, mirrored, and a Sigmoid."""
    widths = [784, *HIDDEN]
    encoder = [layer for pair in pairwise(widths) for layer in _block(*pair)]
    mirrored = [LATENT, *reversed(HIDDEN)]
    decoder = [layer for pair in pairwise(mirrored) for layer in _block(*pair)]
    return nn.ModuleDict(
        {
            "encoder": nn.Sequential(*encoder, nn.Linear(HIDDEN[-1], LATENT)),
            "decoder": nn.Sequential(*decoder, nn.Linear(HIDDEN[0], 784), nn.Sigmoid()),
        }
    )


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]


def network(task: str) -> nn.Module:
    """The network of a task."""
    torch.manual_seed(0)
    if task == "feddcn":
        return autoencoder()
    if task == "tiny":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    )  # fmt: skip


def optimizer(task: str, model: nn.Module) -> torch.optim.Optimizer:
    """Adam for the autoencoder, else SGD."""
    if task == "feddcn":
        return torch.optim.Adam(model.parameters(), lr=TASKS[task].lr)
    return torch.optim.SGD(model.parameters(), lr=TASKS[task].lr)


def loss_of(task: str, model: Any, batch: Tensors) -> torch.Tensor:
    """Cross-entropy, or FedDCN's three terms."""
    if task != "feddcn":
        return F.cross_entropy(model(batch["x"]), batch["y"])
    x = batch["x"]
    z = model["encoder"](x)
    assigned = batch["centers"][torch.cdist(z.detach(), batch["centers"]).argmin(1)]
    recon, clust = F.mse_loss(model["decoder"](z), x), (z - assigned).square().sum(1).mean()
    geom = F.mse_loss(model["encoder"](batch["geometry_x"]), batch["target"])
    return RECON * recon + CLUST * clust + GEOM * geom


def joined(task: str, batch: Tensors, extra: Tensors, generator: torch.Generator | None = None) -> Tensors:
    """Adds what stage 3 of FedDCN adds to a batch: as many synthetic rows, and as many with their embedding."""
    if task != "feddcn":
        return batch
    rows, synthetic = len(batch["x"]), extra["synthetic"]
    first, second = (torch.randint(len(synthetic), (rows,), generator=generator) for _ in range(2))
    x = torch.cat([batch["x"], synthetic[first]])
    return {"x": x, "geometry_x": synthetic[second], "target": extra["geometry"][second], "centers": extra["centers"]}


def write_rows(path: Path, clients: list[tuple[np.ndarray, np.ndarray]], extra: dict[str, np.ndarray]) -> None:
    """Keeps the clients' rows and the server's synthetic ones for the peers."""
    own = {f"x{client}": x for client, (x, _) in enumerate(clients)}
    own |= {f"y{client}": y for client, (_, y) in enumerate(clients)}
    np.savez(path, **own, **{f"extra_{name}": value for name, value in extra.items()})


def read_rows(path: str | Path) -> tuple[list[Tensors], Tensors]:
    """What `write_rows` wrote."""
    with np.load(path) as archive:
        count = sum(name.startswith("x") for name in archive.files)
        clients = [
            {"x": torch.from_numpy(archive[f"x{client}"]), "y": torch.from_numpy(archive[f"y{client}"])}
            for client in range(count)
        ]
        extra = {
            name.removeprefix("extra_"): torch.from_numpy(archive[name])
            for name in archive.files
            if name.startswith("extra_")
        }
    return clients, extra
