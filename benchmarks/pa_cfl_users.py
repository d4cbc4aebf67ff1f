"""Users and management server of PA-CFL as they run, for benchmarks that look at one round of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedclust import FederatedDataModule, InProcess, PrivateAdaptiveCFL
from fedclust.algorithms.pa_cfl_round import Round
from fedclust.data.partition import Natural
from fedclust.data.tables import Source
from fedclust.federation.algorithm import Server
from fedclust.federation.client import parameter_count
from fedclust.federation.context import WorkContext, make_fabric
from fedclust.privacy.importance import count_of
from lightning_modules.pa_cfl import PrivateAdaptiveClient


def dealt_by_hand(source: Source, rows: list[np.ndarray], seed: int) -> FederatedDataModule:
    """One user per array of row numbers; all rows train, test rows stay as they are."""
    ids = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
    chosen = replace(source, train=source.train.select(np.concatenate(rows)))
    # Natural sorts its ids as what they are, so user i is the i-th array.
    return FederatedDataModule(chosen, Natural(ids), seed=seed, val_fraction=0.0)


def first_round(
    data: FederatedDataModule,
    algorithm: PrivateAdaptiveCFL,
    client: PrivateAdaptiveClient,
    precision: str,
    threads: int,
) -> Round:
    """The first round of all users from the initial weights, before any phase; set up as the federated loop does."""
    data.setup()
    device = torch.device("cpu")
    client.build(data.input_shape, data.n_classes)
    client.initialize(data.resolved_seed)
    backend = InProcess(threads=threads)
    backend.connect(client, data, seed=data.resolved_seed, device=device, precision=precision)
    backend.round = 1
    sizes = {user: rows for user, rows in enumerate(data.n_rows) if rows > 0}
    context = WorkContext("server", 1, data.resolved_seed, make_fabric(device, precision))
    server = Server(backend, client, sorted(sizes), sizes, data.input_shape, data.n_classes, context, len(sizes))
    k = count_of(algorithm.top_k, parameter_count(client))
    return Round(algorithm, algorithm.start(server), server, server.clients, k)
