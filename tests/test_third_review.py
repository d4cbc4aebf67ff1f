"""What a third reader of the library stumbled over, each with the right answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedclust
import lightning_modules
from fedclust.cli import main
from fedclust.launch.errors import explain

QUICK: dict[str, Any] = {
    "geometry_pretrain": 0.0, "geometry_federated": 0.0, "pretrain_epochs": 1, "cluster_epochs": 1, "round_epochs": 1,
    "n_synthetic": 60,
}  # fmt: skip


def test_a_logger_that_is_not_installed_names_the_extra() -> None:
    error = ModuleNotFoundError("Neither `tensorboard` nor `tensorboardX` is available. Requirement 'x' not met")
    assert "pip install 'fedclust[tensorboard]'" in explain(error)


def test_a_checkpoint_of_another_width_is_told_by_its_first_layer() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(3, 4).load_state_dict(torch.nn.Linear(5, 4).state_dict() | {"bias": torch.zeros(7)})
    told = explain(caught.value)
    assert told.startswith("the checkpoint does not fit this model: weight: copying a param with shape")
    assert "bias" not in told


def test_the_automatic_partition_leaves_no_client_with_a_single_row() -> None:
    rng = np.random.default_rng(0)
    for seed in range(20):
        data = fedclust.FederatedDataModule((rng.random((120, 4)), rng.integers(0, 2, 120)), seed=seed)
        assert min(len(data.client(client).train) for client in range(data.n_clients)) >= 4


def test_a_result_without_a_directory_names_no_checkpoint() -> None:
    data = fedclust.FederatedDataModule([np.random.default_rng(0).random((40, 4)) for _ in range(2)], seed=0)
    module = lightning_modules.DCN(n_clusters=2, hidden_dims=[4], latent_dim=2)
    result = fedclust.federate(fedclust.FedDCN(**QUICK), module, data, rounds=1, progress=False)
    assert result.summary["checkpoint"] is None
    with pytest.raises(ValueError, match="FedDCN does not group clients, so no client has a group"):
        _ = result.assignments


def test_a_resumed_run_says_when_another_monitor_chose_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    def fit(rounds: int, start: list[str], *more: str) -> tuple[Path, list[str]]:
        small = [f"--model.algorithm.{name}={value}" for name, value in QUICK.items()]
        assert main(["fit", *start, f"--trainer.max_epochs={rounds}", f"--runs_root={tmp_path}", *small, *more]) == 0
        run = Path(capsys.readouterr().out.rpartition("run: ")[2].strip())
        return run, json.loads((run / "summary.json").read_text())["notes"]

    first, _ = fit(2, ["--config", "feddcn_digits"])
    resume = [f"--ckpt_path={first / 'checkpoints' / 'last.ckpt'}"]
    _, notes = fit(3, resume, "--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val/recon")
    assert any("another monitor: val/recon chose among the new rounds" in note for note in notes)
    _, notes = fit(3, resume)
    assert not any("another monitor" in note for note in notes)
