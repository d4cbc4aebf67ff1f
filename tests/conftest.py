"""Shared helpers: tiny data, tiny models, a quiet Trainer, and a toy method whose numbers are known by hand."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from fedclust.algorithms.feddcn import FedDCN
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.tables import ClientData, Table
from fedclust.federation.backend import InProcess
from fedclust.federation.context import ClientContext, WorkContext, make_fabric
from fedclust.federation.message import Message
from fedclust.report.quiet import _WARNINGS, quiet_lightning
from lightning_modules.dcn import DCN

sys.path.insert(0, str(Path(__file__).parent))  # worker processes get it too, and import `toys` from there
from toys import ToyAlgorithm, ToyClient


def pytest_configure(config: pytest.Config) -> None:
    for text in (*_WARNINGS, r".*The dirpath has changed.*"):
        config.addinivalue_line("filterwarnings", f"ignore:{text}")


@pytest.fixture(autouse=True, scope="session")
def _one_quiet_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    quiet_lightning()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def real_data_root() -> Path:
    """Folder with real MNIST and FashionMNIST files, or skip."""
    beside_the_repository = Path(__file__).parents[2] / "shared" / "data"
    for place in (os.environ.get("FEDCLUST_DATA"), beside_the_repository):
        if place and (Path(place) / "MNIST" / "raw").is_dir():
            return Path(place)
    pytest.skip("no MNIST files on this machine")


def _blob_arrays(
    sizes: tuple[int, ...], n_blobs: int = 3, n_features: int = 6, seed: int = 0
) -> list[tuple[np.ndarray, np.ndarray]]:
    """One (x, y) per client, x in [0, 1]: blob b has its features b and b + n_blobs near .9, all others near .1."""
    rng = np.random.default_rng(seed)
    clients = []
    for size in sizes:
        y = np.arange(size) % n_blobs
        x = np.full((size, n_features), 0.1)
        for b in range(n_blobs):
            x[y == b, b::n_blobs] = 0.9
        clients.append(((x + rng.normal(0, 0.03, x.shape)).clip(0, 1).astype(np.float32), y))
    return clients


@pytest.fixture
def blob_arrays() -> Callable[..., list[tuple[np.ndarray, np.ndarray]]]:
    return _blob_arrays


@pytest.fixture
def blobs() -> Callable[..., FederatedDataModule]:
    """Data module of well separated blobs; `labels=False` leaves the labels out."""

    def make(
        sizes: tuple[int, ...] = (30, 20, 25), *, labels: bool = True, n_blobs: int = 3, n_features: int = 6,
        data_seed: int = 0, **options: Any,
    ) -> FederatedDataModule:  # fmt: skip
        arrays = _blob_arrays(sizes, n_blobs, n_features, data_seed)
        source = arrays if labels else [x for x, _ in arrays]
        return FederatedDataModule(source, **{"seed": 0, "val_fraction": 0.2, "test_fraction": 0.2, **options})

    return make


def _dcn(**changes: Any) -> DCN:
    settings = {"n_clusters": 3, "hidden_dims": [8], "latent_dim": 2, "batch_size": 8, "lr": 0.01}
    return DCN(**{**settings, **changes})


def _feddcn(**changes: Any) -> FedDCN:
    settings: dict[str, Any] = {
        "geometry_pretrain": 0.0, "geometry_federated": 0.0, "pretrain_epochs": 2, "cluster_epochs": 1,
        "round_epochs": 1, "n_synthetic": 30, "sampling": "diagonal", "counts": "assigned",
    }  # fmt: skip
    return FedDCN(**{**settings, **changes})


@pytest.fixture
def dcn() -> Callable[..., DCN]:
    """A tiny DCN: K=3, d=2, one hidden layer of 8."""
    return _dcn


@pytest.fixture
def feddcn() -> Callable[..., FedDCN]:
    """A quick FedDCN without UMAP."""
    return _feddcn


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., pl.Trainer]:
    """A quiet Trainer on the CPU that writes best.ckpt and last.ckpt below `folder` (default: the test's own)."""

    def make(rounds: int = 2, *, folder: str = "run", monitor: str | None = None, **flags: Any) -> pl.Trainer:
        keeper = ModelCheckpoint(
            str(tmp_path / folder), filename="best", monitor=monitor, save_last=True, enable_version_counter=False
        )
        settings: dict[str, Any] = {
            "accelerator": "cpu", "logger": False, "num_sanity_val_steps": 0, "enable_progress_bar": False,
            "enable_model_summary": False, "default_root_dir": tmp_path / folder,
        }  # fmt: skip
        callbacks = [keeper, *flags.pop("callbacks", [])]
        return pl.Trainer(max_epochs=rounds, **{**settings, **flags}, callbacks=callbacks)

    return make


def _work_context(
    table: Table | None = None,
    *,
    seed: int = 0,
    round: int = 1,
    precision: str = "32-true",
    state: Message | None = None,
) -> Any:
    fabric = make_fabric(torch.device("cpu"), precision)
    if table is None:
        return WorkContext("server", round, seed, fabric)
    data = ClientData(table, table.select(slice(0, 0)), table.select(slice(0, 0)))
    return ClientContext("client 0", round, seed, fabric, id=0, data=data, state=state or {})


@pytest.fixture
def context() -> Callable[..., Any]:
    """A context of local work: the server's, or client 0's over a table."""
    return _work_context


@pytest.fixture
def table() -> Callable[..., Table]:
    """A table over the given rows."""

    def make(x: Tensor, y: Tensor | None = None) -> Table:
        return Table(x, y, np.arange(len(x)))

    return make


@dataclass(frozen=True)
class Toy:
    client: type[ToyClient] = ToyClient
    algorithm: type[ToyAlgorithm] = ToyAlgorithm


@pytest.fixture
def toy() -> Toy:
    return Toy()


class Shuffled(InProcess):
    """Runs clients in another order every time."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self._draw = np.random.default_rng(seed)
        self.ran: list[int] = []

    def order(self, clients: list[int]) -> list[int]:
        order = [clients[i] for i in self._draw.permutation(len(clients))]
        self.ran.extend(order)
        return order


@pytest.fixture
def shuffled() -> type[Shuffled]:
    return Shuffled
