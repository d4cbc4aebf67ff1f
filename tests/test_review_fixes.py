"""Mistakes that a review and a first user met once."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping

import fedclust
from fedclust.cli import main
from fedclust.data.partition import Iid
from fedclust.federation.backend import InProcess
from fedclust.federation.checkpoint import KEY
from fedclust.launch.arguments import configs_name_checkpoint
from fedclust.launch.configs import find_config
from lightning_modules.dcn import DCN


def federate(algorithm: Any, client: Any, data: Any, rounds: int = 2, **options: Any) -> fedclust.Result:
    return fedclust.federate(algorithm, client, data, rounds, progress=False, **options)


def test_predict_takes_tables_and_raw_rows_under_a_scaling(feddcn: Any, dcn: Any, blob_arrays: Any) -> None:
    x, y = blob_arrays((90,))[0]
    raw = x * 50 + 3
    data = fedclust.FederatedDataModule((raw, y), Iid(3), scale="minmax", seed=0)
    result = federate(feddcn(), dcn(), data)
    assert np.array_equal(result.predict(data.test), result.predict(raw[data.test.rows]))


def test_initial_weights_do_not_depend_on_other_threads() -> None:
    found: list[bytes] = []

    def initialise() -> None:
        for _ in range(30):
            module = DCN(n_clusters=3, hidden_dims=[8], latent_dim=2, input_dim=5)
            module.initialize(0)
            found.append(torch.cat([p.detach().flatten() for p in module.parameters()]).numpy().tobytes())

    threads = [threading.Thread(target=initialise) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1


def test_a_directory_serves_one_run_and_load_reads_all_of_it(feddcn: Any, dcn: Any, blobs: Any, tmp_path: Path) -> None:
    result = federate(feddcn(), dcn(), blobs(), directory=tmp_path / "run")
    loaded = fedclust.load(tmp_path / "run")
    assert loaded.metrics["test/acc"] == result.metrics["test/acc"]
    assert [row["round"] for row in loaded.history] == [1.0, 2.0]
    with pytest.raises(ValueError, match="not empty"):
        federate(feddcn(), dcn(), blobs(), directory=tmp_path / "run")


def test_skipped_clients_are_noted(feddcn: Any, dcn: Any, blobs: Any, monkeypatch: Any) -> None:
    original = DCN.evaluate

    def evaluate(self: Any, message: Any, ctx: Any) -> Any:
        if ctx.id == 1:
            raise RuntimeError("gone")
        return original(self, message, ctx)

    evaluate.__fedclust_action__ = True  # type: ignore[attr-defined]
    monkeypatch.setattr(DCN, "evaluate", evaluate)
    result = federate(feddcn(), dcn(), blobs(), backend=InProcess(on_failure="skip"))
    assert any("client 1 failed in 'evaluate'" in note for note in result.notes)


def test_infinite_batchnorm_statistics_stop_the_client_that_has_them(feddcn: Any, dcn: Any, blobs: Any) -> None:
    class Overflowing(DCN):
        def terms(self, batch: Any, weights: Any) -> Any:
            found = super().terms(batch, weights)
            self.encoder[1].running_var.fill_(float("inf"))
            return found

    client = Overflowing(n_clusters=3, hidden_dims=[8], latent_dim=2, batch_size=8)
    with pytest.raises(Exception, match=r"client 0, round 0, action 'learn_locally'"):
        federate(feddcn(), client, blobs())


def test_a_null_ckpt_path_is_no_checkpoint(tmp_path: Path) -> None:
    for text, named in (("null", False), ("~", False), ("", False), ("last.ckpt", True)):
        path = tmp_path / "c.yaml"
        path.write_text(f"seed_everything: 0\nckpt_path: {text}\n")
        assert configs_name_checkpoint([path]) is named


def test_a_mistyped_path_is_not_taken_for_a_shipped_configuration() -> None:
    assert find_config("feddcn_digits") == find_config("configs/feddcn_digits.yaml").resolve()
    with pytest.raises(ValueError, match="there is no file"):
        find_config("experiments/feddcn_digits.yaml")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_central_training_clips_too(blobs: Any) -> None:
    norms: list[float] = []

    class Watched(DCN):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            pass

        def configure_gradient_clipping(self, optimizer: Any, *values: Any, **named: Any) -> None:
            super().configure_gradient_clipping(optimizer, *values, **named)
            norms.append(float(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()))

    module = Watched(n_clusters=3, hidden_dims=[8], latent_dim=2, max_grad_norm=1e-3, recon_weight=1000.0)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, datamodule=blobs(batch_size=8))
    assert norms
    assert max(norms) <= 1e-3 * 1.01


def test_a_client_class_from_inside_a_function_gives_a_result(feddcn: Any, blobs: Any) -> None:
    class Local(DCN):
        pass

    result = federate(feddcn(), Local(n_clusters=3, hidden_dims=[8], latent_dim=2, batch_size=8), blobs())
    assert type(result.module) is Local


def test_numpy_numbers_are_numbers(blobs: Any, feddcn: Any, tmp_path: Path) -> None:
    client = DCN(n_clusters=np.int64(3), hidden_dims=[np.int64(8)], latent_dim=2, batch_size=8, lr=np.float64(0.01))
    result = federate(feddcn(recon_weight=np.float32(1)), client, blobs())
    assert fedclust.load(result.save(tmp_path / "r.pt")).metrics == result.metrics


def test_a_misspelt_monitor_is_refused_before_training(feddcn: Any, dcn: Any, blobs: Any) -> None:
    asked: list[str] = []
    with pytest.raises(ValueError, match=r"EarlyStopping monitors 'val/dib'.*val/dbi"):
        federate(feddcn(), dcn(), blobs(), callbacks=[EarlyStopping("val/dib"), _Watch(asked)])
    assert asked == []
    with pytest.raises(ValueError, match="val/acc"):
        federate(feddcn(), dcn(), blobs(labels=False), monitor="val/acc", mode="max")


class _Watch(pl.Callback):
    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.asked.append("trained")


def test_load_does_not_import_what_a_file_names(feddcn: Any, dcn: Any, blobs: Any, tmp_path: Path) -> None:
    path = federate(feddcn(), dcn(), blobs()).save(tmp_path / "r.pt")
    saved = torch.load(path, weights_only=True)
    saved[KEY]["client"] = "this.X"
    torch.save(saved, path)
    with pytest.raises(ValueError, match=r"names the class this\.X"):
        fedclust.load(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"no checkpoint|damaged"):
        fedclust.load(path)


def test_natural_clients_that_a_partition_ignores_are_mentioned(blob_arrays: Any) -> None:
    x, y = blob_arrays((60,))[0]
    data = fedclust.FederatedDataModule([(x[:30], y[:30]), (x[30:], y[30:])], Iid(3), seed=0)
    with pytest.warns(UserWarning, match="which client each row belongs to"):
        data.setup()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedclust.FederatedDataModule([(x[:30], y[:30]), (x[30:], y[30:])], seed=0).setup()


def test_abbreviated_flags_are_refused(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "feddcn_digits", "--trainer.max_epoch", "1"]) == 2
    assert "max_epoch" in capsys.readouterr().err


def test_a_result_prints_short(feddcn: Any, dcn: Any, blobs: Any) -> None:
    assert len(repr(federate(feddcn(), dcn(), blobs()))) < 2000
