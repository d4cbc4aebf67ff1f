"""Small PA-CFL runs with planted groups, and a record of every message that a server sees or sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclust.algorithms.pa_cfl import PrivateAdaptiveCFL
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import LabelGroups
from fedclust.federation.loop import FederatedLoop
from fedclust.federation.message import Message
from lightning_modules.pa_cfl import PrivateAdaptiveClient

LR = 0.1


def rows(groups: list[list[int]], per_group: int, n_features: int = 6) -> FederatedDataModule:
    rng = np.random.default_rng(0)
    y = np.arange(360) % 6
    x = (np.eye(6)[y][:, :n_features] * 0.8 + rng.normal(0.1, 0.03, (360, n_features))).astype(np.float32)
    held = np.isin(y, [label for group in groups for label in group])
    x, y = x[held], y[held]
    return FederatedDataModule((x, y), LabelGroups(groups, clients_per_group=per_group), seed=0)


def method(**changes: Any) -> PrivateAdaptiveCFL:
    settings: dict[str, Any] = {
        "round_epochs": 1,
        "top_k": 0.02,
        "similarity": "index_overlap",
        "noise": "simulated",
        "sync_period": None,
    }
    return PrivateAdaptiveCFL(**{**settings, **changes})


def fit(
    trainer: Callable[[int], Any],
    algorithm: PrivateAdaptiveCFL,
    data: FederatedDataModule,
    rounds: int = 1,
    **options: Any,
) -> FederatedLoop:
    """A run of the method with a small network."""
    loop = FederatedLoop(algorithm, PrivateAdaptiveClient("mlp", lr=LR, batch_size=16), **options)
    trainer(rounds).fit(loop, datamodule=data)
    return loop


def own(loop: FederatedLoop, user: int) -> Tensor:
    """A user's own model as one vector, in the order of the parameters."""
    state = loop.backend.states.get(user)
    names = [name for name, _ in loop.client.named_parameters()]
    return torch.cat([torch.as_tensor(state[f"own/{name}"]).flatten() for name in names])


class Recorder:
    """Keeps every message that reached a server."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Message]] = []

    def __call__(self, receiver: str, sender: str, message: Message) -> None:
        self.seen.append((receiver, sender, message))

    def of(self, receiver: str, name: str) -> dict[str, Any]:
        return {sender: message[name] for to, sender, message in self.seen if to == receiver and name in message}

    def to_users(self, name: str) -> dict[str, Any]:
        return {to: message[name] for to, _, message in self.seen if to.startswith("client") and name in message}
