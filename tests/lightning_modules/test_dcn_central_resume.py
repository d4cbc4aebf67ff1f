"""A central run that is interrupted and resumed ends with the bits of an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import Iid
from fedclust.report.selection import LastCheckpoint
from lightning_modules.dcn import DCN


def run(folder: Path, epochs: int, ckpt_path: Path | None = None) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    data = FederatedDataModule("digits", Iid(3), seed=0, batch_size=64)
    module = DCN(n_clusters=4, hidden_dims=[16], latent_dim=2, pretrain_epochs=2)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[LastCheckpoint(folder)],
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: value.clone() for name, value in module.state_dict().items()}, metrics


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("interrupted_after", [1, 3])
def test_central_resume_gives_equal_bits(tmp_path: Path, interrupted_after: int) -> None:
    whole, metrics = run(tmp_path / "whole", 5)
    run(tmp_path / "part", interrupted_after)
    resumed, resumed_metrics = run(tmp_path / "rest", 5, tmp_path / "part" / "last.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert metrics["val/dbi"] == resumed_metrics["val/dbi"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_validation_sees_the_centres_that_the_checkpoint_holds(tmp_path: Path) -> None:
    _, metrics = run(tmp_path, 4)
    data = FederatedDataModule("digits", Iid(3), seed=0, batch_size=64)
    module = DCN(n_clusters=4, hidden_dims=[16], latent_dim=2, pretrain_epochs=2)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    found = trainer.validate(module, datamodule=data, ckpt_path=tmp_path / "last.ckpt", verbose=False)[0]
    assert found["val/dbi"] == pytest.approx(metrics["val/dbi"], rel=1e-6)


def test_central_training_runs_in_half_precision_at_default_settings(tmp_path: Path) -> None:
    data = FederatedDataModule("digits", Iid(2), seed=0)
    module = DCN(10, [8], 3, pretrain_epochs=1, batch_size=512)
    assert module.max_grad_norm == 1.0
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, precision="bf16-mixed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert all(bool(torch.isfinite(value).all()) for value in module.exchanged().values())
    assert float(trainer.callback_metrics["train/recon"]) < 0.25
