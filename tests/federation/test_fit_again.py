"""H2: a second fit does what it says: afresh with a new Trainer, further with the same one."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from fedclust.algorithms.feddcn import FedDCN
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import Iid
from fedclust.federation.loop import FederatedLoop
from fedclust.federation.processes import Processes
from lightning_modules.dcn import DCN


def loop_and_data() -> tuple[FederatedLoop, FederatedDataModule]:
    x = torch.rand(90, 6, generator=torch.Generator().manual_seed(0))
    algorithm = FedDCN(
        geometry_pretrain=0.0,
        geometry_federated=0.0,
        pretrain_epochs=1,
        cluster_epochs=1,
        round_epochs=1,
        n_synthetic=30,
    )
    return FederatedLoop(algorithm, DCN(n_clusters=3, hidden_dims=[8], latent_dim=2)), FederatedDataModule(
        (x,), Iid(3), seed=0
    )


def trainer(rounds: int) -> pl.Trainer:
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    settings["num_sanity_val_steps"] = 0
    return pl.Trainer(max_epochs=rounds, accelerator="cpu", enable_model_summary=False, **settings)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_new_trainer_starts_afresh_and_the_same_one_goes_on() -> None:
    loop, data = loop_and_data()
    first = trainer(2)
    first.fit(loop, datamodule=data)
    centers, counts = loop.state.to_flat()["centers"], loop.byte_counts()
    trainer(2).fit(loop, datamodule=data)
    assert torch.equal(loop.state.to_flat()["centers"], centers)
    assert loop.byte_counts() == counts

    again = trainer(1)
    again.fit(loop, datamodule=data)
    again.fit_loop.max_epochs = 2
    again.fit(loop, datamodule=data)
    assert torch.equal(loop.state.to_flat()["centers"], centers)
    assert loop.byte_counts() == counts


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_time_of_starting_workers_adds_up() -> None:
    loop, data = loop_and_data()
    loop.backend = Processes(1)
    again = trainer(1)
    again.fit(loop, datamodule=data)
    loop.server.seconds["workers"] += 1000
    loop.backend.close()
    again.fit_loop.max_epochs = 2
    again.fit(loop, datamodule=data)
    loop.backend.close()
    assert loop.seconds["workers"] > 1000
