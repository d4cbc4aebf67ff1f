"""How the shared cases run a method; a new method is one line in METHODS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from fedclust.algorithms.fedavg import FedAvg
from fedclust.algorithms.feddcn import FedDCN
from fedclust.algorithms.flameche import FLAMECHE
from fedclust.algorithms.fmcl import FMCL
from fedclust.algorithms.local_only import LocalOnly
from fedclust.algorithms.pa_cfl import PrivateAdaptiveCFL
from fedclust.federation.algorithm import Algorithm
from fedclust.federation.client import ClientModule
from fedclust.federation.loop import FederatedLoop
from fedclust.federation.message import digest
from fedclust.report.predictions import weights_only
from lightning_modules.classifier import Classifier
from lightning_modules.dcn import DCN
from lightning_modules.flameche import FLAMECHEClient
from lightning_modules.fmcl import FMCLClient
from lightning_modules.pa_cfl import PrivateAdaptiveClient


@dataclass(frozen=True)
class Method:
    """A method with settings that make it quick on the blobs.

    Attributes:
        needs_labels: Whether it refuses data without labels.
    """

    algorithm: Callable[[], Algorithm]
    client: Callable[[], ClientModule]
    needs_labels: bool = False


def _feddcn() -> FedDCN:
    return FedDCN(
        geometry_pretrain=0.0,
        geometry_federated=0.0,
        pretrain_epochs=2,
        cluster_epochs=1,
        round_epochs=1,
        n_synthetic=30,
    )


def _dcn() -> DCN:
    return DCN(n_clusters=3, hidden_dims=[8], latent_dim=2, batch_size=8, lr=0.01)


def _classifier() -> Classifier:
    return Classifier("mlp", lr=0.1, batch_size=8)


def _private(**changes: Any) -> Callable[[], PrivateAdaptiveCFL]:
    settings = {"round_epochs": 1, "top_k": 0.02, "epsilon": 50.0, "sync_period": 2, "noise": "simulated", **changes}
    return lambda: PrivateAdaptiveCFL(**settings)


def _private_client() -> PrivateAdaptiveClient:
    return PrivateAdaptiveClient("mlp", lr=0.1, batch_size=8)


def _fmcl_client() -> FMCLClient:
    return FMCLClient(network="mlp", lr=0.1, batch_size=8)


def _flameche_client() -> FLAMECHEClient:
    return FLAMECHEClient("mlp", lr=0.1, batch_size=8)


METHODS = {
    "FedDCN": Method(_feddcn, _dcn),
    "FedAvg": Method(FedAvg, _classifier, needs_labels=True),
    "LocalOnly": Method(LocalOnly, _classifier, needs_labels=True),
    "FMCL": Method(FMCL, _fmcl_client, needs_labels=True),
    "FLAMECHE": Method(lambda: FLAMECHE(1), _flameche_client, needs_labels=True),
    "PrivateAdaptiveCFL": Method(_private(), _private_client, needs_labels=True),
    "PrivateAdaptiveCFL without privacy": Method(
        _private(privacy=False, similarity="index_overlap", recluster_every=2), _private_client, needs_labels=True
    ),
}


@pytest.fixture(params=METHODS.values(), ids=METHODS)
def method(request: pytest.FixtureRequest) -> Method:
    return request.param


@dataclass
class Run:
    """A finished run."""

    loop: FederatedLoop
    data: Any
    trainer: pl.Trainer
    folder: Path

    def bits(self) -> dict[str, bytes]:
        """Fingerprints of all that must not differ: server state, client state, byte counts."""
        found = {name: digest(value) for name, value in self.loop.state.to_flat().items()}
        for client in range(self.data.n_clients):
            state = self.loop.backend.states.get(client)
            found |= {f"client {client}/{name}": digest(value) for name, value in state.items()}
        return {**found, "bytes": str(self.loop.byte_counts()).encode()}

    def metrics(self) -> dict[str, float]:
        """The latest metrics without times."""
        return {name: value for name, value in self.loop.latest.items() if not name.startswith("seconds/")}

    def predict(self, checkpoint: str | None = None) -> list[Any]:
        outputs = self.trainer.predict(
            self.loop, datamodule=self.data, ckpt_path=checkpoint, **weights_only(self.trainer.predict)
        )
        return list(outputs or [])


@pytest.fixture
def run(method: Method, blobs: Any, trainer: Any, tmp_path: Path) -> Callable[..., Run]:
    """Runs the method on the blobs."""

    def start(
        rounds: int = 3, *, data: Any = None, seed: int = 0, resume: Path | None = None, folder: str = "run",
        backend: Any = None, cohort_size: int | None = None, **flags: Any,
    ) -> Run:  # fmt: skip
        data = blobs(seed=seed) if data is None else data
        loop = FederatedLoop(method.algorithm(), method.client(), backend, cohort_size)
        with_trainer = trainer(rounds, folder=folder, **flags)
        path = None if resume is None else str(resume)
        with_trainer.fit(loop, datamodule=data, ckpt_path=path, **weights_only(with_trainer.fit))
        return Run(loop, data, with_trainer, tmp_path / folder)

    return start


def load(path: Path) -> dict[str, Any]:
    """A checkpoint, refusing pickled objects."""
    return torch.load(path, map_location="cpu", weights_only=True)


@pytest.fixture
def load_checkpoint() -> Callable[[Path], dict[str, Any]]:
    return load
