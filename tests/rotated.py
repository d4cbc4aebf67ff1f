"""Small FLAMECHE runs with planted groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedclust.algorithms.flameche import FLAMECHE
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import Iid
from fedclust.data.transforms import Rotations
from fedclust.federation.loop import FederatedLoop
from lightning_modules.flameche import FLAMECHEClient


def planted(clients: int = 8, transform: Any = None, seed: int = 0, **options: Any) -> FederatedDataModule:
    """Images of a bright half, the class telling which; groups by rotation or by exchanged labels."""
    rng = np.random.default_rng(0)
    y = np.arange(clients * 24) % 2
    x = rng.uniform(0, 0.2, (len(y), 1, 8, 8)).astype(np.float32)
    x[y == 0, :, :3] += 0.7
    x[y == 1, :, :3, :3] += 0.7
    return FederatedDataModule((x, y), Iid(clients), transform=transform or Rotations([0, 180]), seed=seed, **options)


def by_class_shares() -> FederatedDataModule:
    """Six clients of noise; every other one has mostly the one class, the rest mostly the other."""
    rng = np.random.default_rng(0)
    clients = []
    for client in range(6):
        y = (np.arange(30) < (25 if client % 2 else 5)).astype(np.int64)
        clients.append((rng.uniform(0, 1, (30, 1, 8, 8)).astype(np.float32), y))
    return FederatedDataModule(clients, seed=0)


def fit(trainer: Any, algorithm: FLAMECHE, rounds: int = 1, folder: str = "run", **options: Any) -> FederatedLoop:
    """A run of the method with a small network; `data` among the options are other data than `planted()`."""
    data = options.pop("data", None) or planted()
    loop = FederatedLoop(algorithm, FLAMECHEClient("small_cnn", lr=0.1, batch_size=16), **options)
    trainer(rounds, folder=folder).fit(loop, datamodule=data)
    return loop
