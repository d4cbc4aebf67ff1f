"""What a command refuses before it trains, and the sentence that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip_a_bit

ROUNDS = "--trainer.max_epochs=1"
CALLBACK = "--trainer.callbacks+="


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            [f"{CALLBACK}EarlyStopping", "--trainer.callbacks.monitor=val/dbi", "--data.init_args.val_fraction=0"],
            "EarlyStopping monitors 'val/dbi', but there are no validation rows: set data.val_fraction",
        ),
        (
            [f"{CALLBACK}EarlyStopping", "--trainer.callbacks.monitor=val/dbi", "--trainer.limit_val_batches=0"],
            "EarlyStopping monitors 'val/dbi', but trainer.limit_val_batches is 0",
        ),
        (
            [f"{CALLBACK}ModelCheckpoint", "--trainer.callbacks.monitor=val/dib"],
            "ModelCheckpoint monitors 'val/dib', which will not exist",
        ),
        (
            [f"{CALLBACK}StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.1"],
            "StochasticWeightAveraging acts on an optimizer of the Trainer",
        ),
        (
            [f"{CALLBACK}GradientAccumulationScheduler", "--trainer.callbacks.scheduling={0: 2}"],
            "GradientAccumulationScheduler acts on an optimizer of the Trainer",
        ),
        ([f"{CALLBACK}LearningRateMonitor"], "LearningRateMonitor needs a logger; set trainer.logger"),
        ([f"{CALLBACK}NoSuch"], "trainer.callbacks: there is no class NoSuch, give its import path. Got NoSuch"),
        ([f"{CALLBACK}No Such"], "there is no class No Such, give its import path. Got No Such"),
        (["--trainer.limit_train_batches=0"], "trainer.limit_train_batches 0: a round is one batch"),
        (["--trainer.limit_train_batches=0.5"], "trainer.limit_train_batches 0.5: a round is one batch"),
        (["--data.init_args.source=gone.npz"], "error: no file /"),
        (["--data.init_args.source=gone"], "there is no gone in /"),
    ],
)
def test_flags_and_callbacks_that_cannot_work(quick_fit: Any, arguments: list[str], told: str) -> None:
    ran = quick_fit(ROUNDS, *arguments)
    assert ran.code == 2
    assert told in ran.err
    assert "\n" not in ran.err.partition("error: ")[2].rstrip("\n")
    assert not list(Path("runs").glob("**/*"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "own.yaml: the file is empty; a configuration has keys such as model, data, trainer"),
        (b"- a\n- b\n", "own.yaml: the file is a list; a configuration has keys"),
        (b"name: \xff\xfe\n", "own.yaml: the file is no UTF-8 text"),
    ],
)
def test_a_file_that_holds_no_keys(command: Any, tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "own.yaml").write_bytes(content)
    ran = command("fit", "--config", "own.yaml")
    assert (ran.code, told in ran.err) == (2, True), ran.err


def test_nothing_to_test(quick_fit: Any, command: Any) -> None:
    ran = quick_fit(ROUNDS, "--trainer.limit_test_batches=0")
    assert ran.code == 0
    assert not any(name.startswith("test/") for name in ran.json("summary.json")["metrics"])
    tested = command("test", "--ckpt_path", str(ran.path / "checkpoints" / "last.ckpt"))
    assert (tested.code, "trainer.limit_test_batches is 0" in tested.err) == (2, True)


def test_a_configured_timer_is_written_into_the_configuration(quick_fit: Any, command: Any) -> None:
    ran = quick_fit(ROUNDS, f"{CALLBACK}Timer", "--trainer.callbacks.duration=00:12:00:00")
    assert ran.code == 0
    assert "interval: step" in (ran.path / "config.yaml").read_text()
    assert command("fit", "--config", str(ran.path / "config.yaml")).code == 0


def test_rows_added_to_the_file_are_told(quick_fit: Any, command: Any, own_data: Any, tmp_path: Path) -> None:
    last = str(quick_fit("--data.init_args.source=own.npz", ROUNDS).path / "checkpoints" / "last.ckpt")
    np.savez(tmp_path / "own.npz", **{name: np.concatenate([value, value[:50]]) for name, value in own_data.items()})
    tested = command("test", "--ckpt_path", last)
    assert (tested.code, "the checkpoint was written with train rows [" in tested.err) == (2, True), tested.err


def test_rows_with_other_owners_are_told(quick_fit: Any, command: Any, own_data: Any, tmp_path: Path) -> None:
    ids = np.arange(200) // 40
    np.savez(tmp_path / "own.npz", **own_data, ids=ids)
    natural = ["--data.init_args.source=own.npz", "--data.init_args.partition=null"]
    last = str(quick_fit(*natural, ROUNDS).path / "checkpoints" / "last.ckpt")
    ids[[0, 150]] = ids[[150, 0]]
    own_data["y"][[0, 150]] = own_data["y"][[150, 0]] = 0
    np.savez(tmp_path / "own.npz", **own_data, ids=ids)
    tested = command("test", "--ckpt_path", last)
    assert (tested.code, "other rows, or rows dealt otherwise to clients" in tested.err) == (2, True), tested.err


def test_a_run_named_like_a_date(quick_fit: Any, command: Any, tmp_path: Path) -> None:
    text = (quick_fit(ROUNDS).path / "config.yaml").read_text()
    (tmp_path / "date.yaml").write_text(text.replace("name: feddcn_digits", "name: 2024-13-45"))
    ran = command("fit", "--config", "date.yaml")
    assert (ran.code, ran.path.parent.name) == (0, "2024-13-45"), ran.err


def test_two_seeds_are_told(quick_fit: Any) -> None:
    ran = quick_fit(ROUNDS, "--data.init_args.seed=3", "--seed_everything=5")
    summary = ran.json("summary.json")
    assert summary["seed"] == 3
    assert "data.seed 3 is the seed of the run; seed_everything 5 is not used" in summary["notes"]


def test_the_start_lies_in_the_run_whatever_other_checkpoints_are_configured(quick_fit: Any, tmp_path: Path) -> None:
    ran = quick_fit(ROUNDS, f"{CALLBACK}ModelCheckpoint", f"--trainer.callbacks.dirpath={tmp_path / 'mine'}")
    assert (ran.path / "checkpoints" / "start.ckpt").is_file()
    assert not (tmp_path / "mine" / "start.ckpt").exists()


# -- checkpoints and other data ---------------------------------------------------------------------------------------


@pytest.fixture
def own_data(tmp_path: Path) -> Any:
    """Writes own.npz: 200 labelled images of two channels, NaN nowhere; returns the arrays."""
    rng = np.random.default_rng(0)
    arrays = {"x": rng.random((200, 2, 4, 4)).astype(np.float32), "y": np.arange(200) % 10}
    np.savez(tmp_path / "own.npz", **arrays)
    return arrays


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("value", "the checkpoint was written with other values of the rows"),
        ("--data.init_args.scale=minmax", "the checkpoint was written with other values of the rows"),
        ("--data.init_args.source=other.npz", "the checkpoint was written with source 'own', this run has 'other'"),
        ("--data.init_args.val_fraction=0.2", "the checkpoint was written with val_fraction 0.1, this run has 0.2"),
    ],
)
def test_a_checkpoint_notices_other_data(
    quick_fit: Any, command: Any, own_data: Any, tmp_path: Path, change: str, told: str
) -> None:  # fmt: skip
    ran = quick_fit("--data.init_args.source=own.npz", ROUNDS)
    last = str(ran.path / "checkpoints" / "last.ckpt")
    assert command("test", "--ckpt_path", last).code == 0
    np.savez(tmp_path / "other.npz", **own_data)
    if change == "value":
        own_data["x"][17, 1, 2, 2] += 0.25
        np.savez(tmp_path / "own.npz", **own_data)
    again = command("test", "--ckpt_path", last, *([change] if change.startswith("--") else []))
    assert (again.code, told in again.err) == (2, True), again.err


def test_rounding_is_no_other_data(quick_fit: Any, command: Any, own_data: Any, tmp_path: Path) -> None:
    last = str(quick_fit("--data.init_args.source=own.npz", ROUNDS).path / "checkpoints" / "last.ckpt")
    up = np.random.default_rng(1).random(own_data["x"].shape) < 0.5
    own_data["x"] = np.nextafter(own_data["x"], np.where(up, 2, -2).astype(np.float32))
    np.savez(tmp_path / "own.npz", **own_data)
    assert command("test", "--ckpt_path", last).code == 0


def test_other_arguments_of_the_client_module_are_noted(quick_fit: Any, command: Any) -> None:
    last = str(quick_fit(ROUNDS).path / "checkpoints" / "last.ckpt")
    tested = command("test", "--ckpt_path", last, "--model.init_args.client.init_args.output=linear")
    assert tested.code == 0
    notes = tested.json("summary.json")["notes"]
    assert any("client module: output 'sigmoid' (now 'linear')" in note for note in notes), notes


@pytest.mark.parametrize("change", ["--seed_everything=1", "--data.init_args.val_fraction=0.2"])
def test_a_central_checkpoint_notices_them_too(command: Any, change: str) -> None:
    small = ["--model.init_args.geometry_weight=0", "--model.init_args.pretrain_epochs=0", ROUNDS]
    ran = command("fit", "--config", "dcn_digits_centralised", *small)
    assert ran.code == 0, ran.err
    last = str(ran.path / "checkpoints" / "last.ckpt")
    assert command("test", "--ckpt_path", last).code == 0
    again = command("test", "--ckpt_path", last, change)
    assert (again.code, "the checkpoint was written with" in again.err) == (2, True), again.err


def test_damaged_checkpoints(quick_fit: Any, command: Any, tmp_path: Path) -> None:
    ran = quick_fit(ROUNDS)
    last = ran.path / "checkpoints" / "last.ckpt"
    flip_a_bit(last)
    tested = command("test", "--ckpt_path", str(last))
    assert (tested.code, "is damaged (or was written without checksums)" in tested.err) == (2, True), tested.err
    torch.save({"state_dict": {}}, last)
    tested = command("test", "--ckpt_path", str(last))
    assert (tested.code, "was not written by a Trainer" in tested.err) == (2, True), tested.err


def test_failures_while_validating_count_in_their_round(client_module: Any, quick_fit: Any) -> None:
    client_module(
        "fails_late",
        """
from lightning_modules import DCN
from fedclust import action

class FailsLate(DCN):
    @action
    def evaluate(self, message, ctx):
        if "client 2" in ctx.who and ctx.round == 2:
            raise RuntimeError("no more")
        return super().evaluate(message, ctx)
""",
    )
    ran = quick_fit(
        "--trainer.max_epochs=3", "--model.init_args.client.class_path=fails_late.FailsLate",
        "--model.init_args.client.init_args.n_clusters=10",
        "--model.init_args.backend=fedclust.InProcess", "--model.init_args.backend.init_args.on_failure=skip",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert [float(row["clients/failed"]) for row in ran.csv("metrics.csv")] == [0.0, 1.0, 0.0]
    assert len(json.loads((ran.path / "summary.json").read_text())["failures"]) == 1
