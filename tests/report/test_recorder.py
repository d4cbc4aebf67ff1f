"""Callbacks under a plain Trainer, with a module whose metrics are known in advance."""

from __future__ import annotations

import csv
import io
import json
import logging

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from fedclust.report.predictions import central_rows, federated_rows, write_predictions
from fedclust.report.progress import RoundProgress
from fedclust.report.quiet import quiet_lightning
from fedclust.report.recorder import RunRecorder
from fedclust.report.selection import (
    BestCheckpoint,
    LastCheckpoint,
    Monitor,
    best_checkpoint,
    choose_monitor,
    uses_labels,
)

VALUES = [3.0, 1.0, 2.0, float("nan"), 1.5]


class Known(pl.LightningModule):
    """Logs one value of a list per epoch."""

    def __init__(self, values: list[float] | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.values = VALUES if values is None else values
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def configure_optimizers(self) -> None:
        return None

    def training_step(self, batch, batch_idx):
        self.weight.data.fill_(self.current_epoch + 1.0)
        self.log("train/recon", float(self.current_epoch), on_epoch=True, on_step=False, batch_size=1)
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()

    def validation_step(self, batch, batch_idx):
        self.log("val/dbi", self.values[self.current_epoch], batch_size=1)

    def train_dataloader(self):
        return [torch.zeros(1)]

    def val_dataloader(self):
        return [torch.zeros(1)]


@pytest.fixture(autouse=True)
def _quiet():
    import warnings

    with warnings.catch_warnings():
        quiet_lightning()
        yield


def fit(directory, *, rounds=5, callbacks=None, ckpt_path=None, **settings):
    monitor = Monitor("val/dbi", "min")
    recorder = RunRecorder(directory, monitor=monitor)
    own = [
        BestCheckpoint(directory / "checkpoints", monitor.name, monitor.mode),
        LastCheckpoint(directory / "checkpoints"),
    ]
    trainer = pl.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=directory,
        callbacks=[recorder, *own, *(callbacks or [])],
        **settings,
    )
    trainer.fit(Known(), ckpt_path=ckpt_path)
    return recorder, trainer


def rows_of(directory):
    with (directory / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_one_row_a_round_and_the_best_round(tmp_path):
    recorder, trainer = fit(tmp_path)
    assert [(row["round"], row["val/dbi"]) for row in rows_of(tmp_path)] == [
        ("1", "3.0"),
        ("2", "1.0"),
        ("3", "2.0"),
        ("4", "nan"),
        ("5", "1.5"),
    ]
    assert list(rows_of(tmp_path)[0]) == ["round", "train/recon", "val/dbi"]
    assert (recorder.summary["selected"], recorder.summary["selected_round"]) == ("best", 2)
    assert recorder.summary["metrics"] == {"train/recon": 1.0, "val/dbi": 1.0}
    assert torch.load(best_checkpoint(trainer), weights_only=True)["state_dict"]["weight"].item() == 2
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]["weight"].item() == 5
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"


def test_a_round_without_validation_has_no_validation_values(tmp_path):
    fit(tmp_path, check_val_every_n_epoch=2)
    assert [row["val/dbi"] for row in rows_of(tmp_path)] == ["", "1.0", "", "nan", ""]


def test_without_validation_the_last_round_is_selected(tmp_path):
    recorder, _ = fit(tmp_path, limit_val_batches=0, rounds=2)
    assert (recorder.summary["selected"], recorder.summary["selected_round"]) == ("last", 2)
    assert "val/dbi" not in rows_of(tmp_path)[0]


def test_early_stopping_is_said(tmp_path):
    stop = EarlyStopping("val/dbi", patience=1, check_finite=False)
    recorder, _ = fit(tmp_path, callbacks=[stop])
    assert (recorder.summary["status"], recorder.summary["rounds"], len(rows_of(tmp_path))) == ("stopped early", 3, 3)


def test_a_resumed_run_has_all_rounds_and_the_best_of_both(tmp_path):
    fit(tmp_path / "a", rounds=3)
    recorder, _ = fit(tmp_path / "b", ckpt_path=tmp_path / "a" / "checkpoints" / "last.ckpt")
    assert [row["round"] for row in rows_of(tmp_path / "b")] == ["1", "2", "3", "4", "5"]
    assert (recorder.summary["selected_round"], recorder.summary["checkpoint"]) == (2, "checkpoints/best.ckpt")
    assert len(rows_of(tmp_path / "a")) == 3


def test_an_exception_is_recorded_and_rounds_stay(tmp_path):
    class Broken(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fit(tmp_path, callbacks=[Broken()])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["error"], summary["rounds"]) == ("failed", "OSError: disk full", 2)
    assert len(rows_of(tmp_path)) == 2


def test_the_configured_monitor_wins_over_the_methods_own():
    module = Known()
    assert choose_monitor(module, []) == Monitor("val/dbi", "min")
    module.default_monitor = ("val/recon", "min")
    assert choose_monitor(module, [ModelCheckpoint()]) == Monitor("val/recon", "min")
    stop = EarlyStopping("val/acc", mode="max")
    assert choose_monitor(module, [stop]) == Monitor("val/acc", "max")
    assert choose_monitor(module, [stop, ModelCheckpoint(monitor="val/nmi", mode="max")]) == Monitor("val/nmi", "max")
    assert [uses_labels(module, name) for name in ("val/acc", "val/nmi", "val/ari", "val/dbi", "train/recon")] == [
        True,
        True,
        True,
        False,
        False,
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_in_a_terminal_counts_rounds_and_shows_what_the_server_does(tmp_path):
    stream = Terminal()
    bar = RoundProgress("val/dbi", stream=stream)
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[bar],
        default_root_dir=tmp_path,
    )
    module = Known()
    module.report_progress = lambda text: None
    module.on_fit_start = lambda: module.report_progress("local work of client 3")
    trainer.fit(module)
    shown = stream.getvalue()
    for text in ("Rounds: 0/3", "local work of client 3", "Rounds: 3/3", "val/dbi=2", "train/recon=2"):
        assert text in shown


def test_progress_elsewhere_is_sparse_lines(tmp_path):
    stream = io.StringIO()
    bar = RoundProgress("val/dbi", interval=1e9, stream=stream)
    trainer = pl.Trainer(
        max_epochs=5,
        accelerator="cpu",
        logger=False,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[bar],
        default_root_dir=tmp_path,
    )
    trainer.fit(Known())
    assert stream.getvalue().splitlines() == [
        "round 1/5  val/dbi=3 train/recon=0",
        "round 5/5  val/dbi=1.5 train/recon=4",
    ]
    bar.disable()
    bar.say("nothing")
    assert len(stream.getvalue().splitlines()) == 2


def test_only_irrelevant_log_lines_are_dropped(caplog):
    logger = logging.getLogger("pytorch_lightning.utilities.rank_zero")
    kept = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())
    logger.addHandler(handler)
    try:
        for text in ("GPU available: False, used: False", "💡 Tip: install something", "a real message"):
            logger.warning(text)
    finally:
        logger.removeHandler(handler)
    assert kept == ["a real message"]


def test_prediction_rows(tmp_path):
    outputs = [
        {
            "client": 1,
            "split": "val",
            "rows": torch.tensor([7, 3]),
            "cluster": torch.tensor([0, 2]),
            "distance": torch.tensor([0.5, 1.0]),
        },
    ]
    rows = list(federated_rows(outputs))
    assert rows == [
        {"row": 7, "client": 1, "cluster": 0, "distance": 0.5, "split": "val"},
        {"row": 3, "client": 1, "cluster": 2, "distance": 1.0, "split": "val"},
    ]
    assert write_predictions(tmp_path / "p.csv", rows) == 2
    assert (tmp_path / "p.csv").read_text().splitlines()[:2] == ["row,client,cluster,distance,split", "7,1,0,0.5,val"]


def test_central_predictions_find_source_row_and_client():
    import numpy as np

    from fedclust.data.datamodule import FederatedDataModule

    x = np.random.default_rng(0).random((30, 4), dtype=np.float32)
    data = FederatedDataModule([(x[:10],), (x[10:],)], seed=0, val_fraction=0.2, test_fraction=0.2)
    data.setup()
    for split in ("train", "val", "test"):
        n = len(getattr(data, split))
        output = {"index": torch.arange(n), "cluster": torch.zeros(n, dtype=torch.int64), "distance": torch.ones(n)}
        rows = list(central_rows([output], data, split))
        for client in (0, 1):
            assert [row["row"] for row in rows if row["client"] == client] == getattr(
                data.client(client), split
            ).rows.tolist()
