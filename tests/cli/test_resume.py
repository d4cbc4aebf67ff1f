"""Runs that end before their time: killed, interrupted, failed; and runs that go on from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KILLER = """
import os, signal
from fedclust.federation.client import action
from lightning_modules.dcn import DCN

class KillerDCN(DCN):
    @action
    def update(self, message, ctx):
        if ctx.round == 3 and ctx.id == 1 and os.environ.get("KILL_IN_ROUND_3"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(message, ctx)
"""
FAILING = """
from fedclust.federation.client import action
from lightning_modules.dcn import DCN

class FailingDCN(DCN):
    bad = (2,)

    @action
    def update(self, message, ctx):
        if ctx.round == 2 and ctx.id in self.bad:
            raise KeyError("no such patient")
        return super().update(message, ctx)

class AllFailingDCN(FailingDCN):
    bad = (0, 1, 2, 3, 4)

class FailingEvaluation(DCN):
    @action
    def evaluate(self, message, ctx):
        if ctx.round == 2 and ctx.id == 4:
            raise ValueError("bad row")
        return super().evaluate(message, ctx)
"""
CALLBACKS = """
import psutil
from pytorch_lightning.callbacks import Callback

class CtrlC(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt

class MemoryProbe(Callback):
    seen = []
    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append(psutil.Process().memory_info().rss)
"""
COUNTING = """
from fedclust.federation.client import action
from lightning_modules.dcn import DCN

class CountingDCN(DCN):
    @action
    def update(self, message, ctx):
        ctx.state["rounds"] = f"{ctx.state.get('rounds', '')} {ctx.round}".strip()
        return super().update(message, ctx)
"""


def state_of(path: Path) -> dict[str, object]:
    saved = torch.load(path, weights_only=True)
    assert isinstance(saved["fedclust"]["state"], dict)
    return saved["fedclust"]


def same_state(one: Path, other: Path) -> None:
    a, b = state_of(one), state_of(other)
    assert a["state"].keys() == b["state"].keys()
    assert all(torch.equal(a["state"][name], b["state"][name]) for name in a["state"])
    assert a["traffic"] == b["traffic"]
    assert a["clients"] == b["clients"]


def without_seconds(rows):
    return [{name: value for name, value in row.items() if not name.startswith("seconds/")} for row in rows]


def test_killed_in_a_round_and_resumed_ends_with_the_same_bits(quick_fit, quick, command, client_module, tmp_path):
    client_module("killer", KILLER)
    swap = ("--model.init_args.client", "killer.KillerDCN", *[entry for entry in quick if ".client." in entry])
    rounds = ("--trainer.max_epochs=5", "--model.init_args.participation=0.7", *swap)
    whole = quick_fit("--name=whole", *rounds)
    assert whole.code == 0, whole.err
    environment = {**os.environ, "KILL_IN_ROUND_3": "1", "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    arguments = ["fit", "--config", "feddcn_digits", *quick, "--name=killed", *rounds]
    killed = subprocess.run([sys.executable, "-m", "fedclust", *arguments], env=environment, check=False, timeout=240)
    assert killed.returncode == -signal.SIGKILL
    left = Path("runs/killed/version_0")
    assert (left / "metrics.csv").read_text().count("\n") == 3
    resumed = command("fit", "--ckpt_path", str(left / "checkpoints" / "last.ckpt"))
    assert resumed.code == 0, resumed.err
    assert resumed.path == Path("runs/killed/version_1")
    summary = resumed.json("summary.json")
    assert (summary["parent"], summary["rounds"], summary["status"]) == (str(left.absolute()), 5, "completed")
    assert without_seconds(resumed.csv("metrics.csv")) == without_seconds(whole.csv("metrics.csv"))
    for name in ("last.ckpt", "best.ckpt"):
        same_state(resumed.path / "checkpoints" / name, whole.path / "checkpoints" / name)
    assert summary["metrics"] == whole.json("summary.json")["metrics"]
    assert summary["bytes"] == whole.json("summary.json")["bytes"]


def test_resuming_before_the_first_round_and_after_the_last(quick_fit, command):
    whole = quick_fit()
    early = command("fit", "--ckpt_path", str(whole.path / "checkpoints" / "start.ckpt"))
    assert early.code == 0, early.err
    same_state(early.path / "checkpoints" / "last.ckpt", whole.path / "checkpoints" / "last.ckpt")
    assert without_seconds(early.csv("metrics.csv")) == without_seconds(whole.csv("metrics.csv"))
    late = command("fit", "--ckpt_path", str(whole.path / "checkpoints" / "last.ckpt"))
    assert late.code == 0, late.err
    assert any("nothing was left to train" in note for note in late.json("summary.json")["notes"])
    assert late.json("summary.json")["metrics"] == whole.json("summary.json")["metrics"]


def test_the_best_round_before_a_resume_stays_the_best(quick_fit, command):
    first = quick_fit(
        "--trainer.max_epochs=2",
        "--trainer.callbacks+=ModelCheckpoint",
        "--trainer.callbacks.monitor=val/recon",
        "--trainer.callbacks.mode=max",
    )
    assert first.json("summary.json")["selected_round"] == 1
    second = command("fit", "--ckpt_path", str(first.path / "checkpoints" / "last.ckpt"), "--trainer.max_epochs=3")
    assert second.code == 0, second.err
    assert second.json("summary.json")["selected_round"] == 1
    same_state(second.path / "checkpoints" / "best.ckpt", first.path / "checkpoints" / "best.ckpt")


def test_ctrl_c_is_an_interruption(quick_fit, client_module):
    client_module("own_callbacks", CALLBACKS)
    before = signal.getsignal(signal.SIGINT)
    ran = quick_fit("--trainer.callbacks+=own_callbacks.CtrlC")
    assert ran.code == 130
    assert ran.json("summary.json")["status"] == "interrupted"
    assert len(ran.csv("metrics.csv")) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failing_client_ends_the_run_and_what_was_saved_stays(quick_fit, client_module, quick):
    client_module("failing", FAILING)
    swap = [entry for entry in quick if ".client." in entry]
    ran = quick_fit("--model.init_args.client", "failing.FailingDCN", *swap)
    assert ran.code == 1
    for part in ("client 2", "round 2", "'update'", "no such patient"):
        assert part in ran.err
    assert "Traceback" not in ran.err
    summary = ran.json("summary.json")
    assert summary["status"] == "failed"
    assert "client 2, round 2" in summary["error"]
    assert [row["round"] for row in ran.csv("metrics.csv")] == ["1"]
    assert (ran.path / "checkpoints" / "last.ckpt").is_file()


def test_skipped_failures_are_listed_and_all_failing_stops(quick_fit, client_module, quick):
    client_module("failing", FAILING)
    swap = [entry for entry in quick if ".client." in entry]
    policy = "--model.init_args.backend.init_args.on_failure=skip"
    ran = quick_fit("--model.init_args.client", "failing.FailingDCN", *swap, policy)
    assert ran.code == 0, ran.err
    (failure,) = ran.json("summary.json")["failures"]
    assert (failure["client"], failure["round"], failure["action"]) == (2, 2, "update")
    assert "no such patient" in failure["traceback"]
    assert [float(row["clients/failed"]) for row in ran.csv("metrics.csv")] == [0, 1, 0]
    ran = quick_fit("--model.init_args.client", "failing.AllFailingDCN", *swap, policy)
    assert ran.code == 1
    assert "all 5 clients" in ran.err
    assert len(ran.csv("metrics.csv")) == 1


def test_a_failing_evaluation_names_its_client(quick_fit, client_module, quick):
    client_module("failing", FAILING)
    swap = [entry for entry in quick if ".client." in entry]
    ran = quick_fit("--model.init_args.client", "failing.FailingEvaluation", *swap)
    assert ran.code == 1
    assert "client 4, round 2, action 'evaluate': ValueError: bad row" in ran.err


def test_a_loss_that_is_not_finite_stops_with_its_client(quick_fit):
    client = "--model.init_args.client.init_args."
    ran = quick_fit(f"{client}lr=1e30", f"{client}output=linear", f"{client}normalization=none")
    assert ran.code == 1
    for part in ("client 0", "round 0", "learn_locally", "loss became"):
        assert part in ran.err
    assert ran.json("summary.json")["status"] == "failed"


def test_client_state_survives_rounds_without_the_client(quick_fit, client_module, quick):
    from fedclust.federation.cohort import Cohorts
    from fedclust.federation.message import unpack

    client_module("counting", COUNTING)
    swap = [entry for entry in quick if ".client." in entry]
    ran = quick_fit("--model.init_args.client", "counting.CountingDCN", *swap, "--model.init_args.cohort_size=2")
    assert ran.code == 0, ran.err
    cohorts = {number: Cohorts(2).draw([0, 1, 2, 3, 4], 0, number) for number in (1, 2, 3)}
    states = {
        client: unpack(packed) for client, packed in state_of(ran.path / "checkpoints/last.ckpt")["clients"].items()
    }
    for client in range(5):
        expected = " ".join(str(number) for number, cohort in cohorts.items() if client in cohort)
        assert states[client].get("rounds", "") == expected


def test_memory_does_not_grow_with_rounds(quick_fit, client_module):
    pytest.importorskip("psutil")
    client_module("own_callbacks", CALLBACKS)
    ran = quick_fit("--trainer.callbacks+=own_callbacks.MemoryProbe", "--trainer.max_epochs=30")
    assert ran.code == 0, ran.err
    import own_callbacks

    seen = own_callbacks.MemoryProbe.seen
    assert len(seen) == 30
    assert seen[-1] - seen[4] < 20e6
