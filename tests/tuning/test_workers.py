"""Workers: each trial once, a dead one is replaced and its trial marked, nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from optuna.trial import TrialState

import tuning.trial
from fedclust.cores import thread_variables
from tuning import workers
from tuning.ledger import reason_of, worker_of
from tuning.objectives import NoSuchMetricError
from tuning.summary import count_trials
from tuning.trial import Outcome
from tuning.workers import Crew, Order, WorkerError, thread_share


@pytest.fixture
def crew(ledger, runner, monkeypatch):
    """A crew whose workers are forks of this process, which is quick, and whose runs are functions."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda method: fork)

    def make(run, total=6, jobs=2, **settings):
        monkeypatch.setattr(tuning.trial, "Runner", lambda blueprint, directory: runner(run))
        book = ledger(jobs=jobs, **settings)
        order = Order(book.name, book.storage, book.directory, book.blueprint, book.settings, total, thread_share(jobs))
        return Crew(order, book, lambda: None), book

    return make


def nobody_left():
    return not multiprocessing.active_children()


def test_trials_are_shared_out(crew, tmp_path):
    def run(values, name, on_round):
        (tmp_path / f"{os.getpid()}.began").touch()
        while len(list(tmp_path.glob("*.began"))) < 2:
            time.sleep(0.02)
        on_round(1, [values["x"]])
        return Outcome("complete", (values["x"],), rounds=1)

    team, book = crew(run, total=8)
    team.run()
    trials = book.trials()
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 8
    assert len({worker_of(trial)["pid"] for trial in trials}) == 2
    assert os.getpid() not in {worker_of(trial)["pid"] for trial in trials}
    assert len({trial.user_attrs["place"] for trial in trials}) == 8
    assert nobody_left()


def test_a_worker_that_dies_is_replaced(crew, tmp_path):
    once = tmp_path / "died"

    def run(values, name, on_round):
        on_round(1, [1.0])
        if name == "trial_1" and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome("complete", (1.0 + values["x"],), rounds=1)

    team, book = crew(run, total=5, requeue=True)
    team.run()
    counted = count_trials(book.trials())
    assert (counted["complete"], counted["killed"]) == (5, 1)
    killed = book.trials()[1]
    assert (killed.state, reason_of(killed)) == (TrialState.FAIL, "killed")
    assert any(trial.params == killed.params for trial in book.trials()[2:])
    assert nobody_left()


def test_workers_that_die_again_and_again_end_the_study(crew, monkeypatch):
    monkeypatch.setattr(workers, "_DEATHS_PER_WORKER", 1)
    team, book = crew(lambda values, name, on_round: os._exit(7), jobs=1)
    with pytest.raises(WorkerError, match=r"2 workers died \(exit code 7"):
        team.run()
    assert count_trials(book.trials())["killed"] == 2
    assert nobody_left()


def test_a_worker_that_dies_before_any_trial_is_not_replaced(crew, monkeypatch):
    team, book = crew(lambda values, name, on_round: None)
    monkeypatch.setattr(workers, "worker_main", lambda order, parent: os._exit(3))
    with pytest.raises(WorkerError, match=r"before its first trial \(exit code 3\)"):
        team.run()
    assert book.trials() == []
    assert nobody_left()


def test_an_error_of_the_study_is_told_by_the_worker(crew):
    def run(values, name, on_round):
        raise NoSuchMetricError("objective 'val/mine' was not logged by round 1; there are val/dbi")

    team, book = crew(run)
    with pytest.raises(WorkerError, match="'val/mine' was not logged"):
        team.run()
    assert not any(trial.state == TrialState.RUNNING for trial in book.trials())
    assert nobody_left()


def test_ctrl_c_marks_the_running_trials_and_leaves_no_process(crew, tmp_path):
    def run(values, name, on_round):
        (tmp_path / f"{name}.began").touch()
        time.sleep(600)

    team, book = crew(run)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

    def press():
        while len(list(tmp_path.glob("*.began"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            team.run()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert [reason_of(trial) for trial in book.trials()] == ["interrupted", "interrupted"]
    assert count_trials(book.trials())["counted"] == 0
    assert nobody_left()


def test_threads_are_shared_out_and_the_variables_put_back(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)), raising=False)
    assert [thread_share(jobs) for jobs in (1, 2, 4, 20)] == [9, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    with thread_variables(2):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["NUMBA_NUM_THREADS"]) == ("2", "2")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "NUMBA_NUM_THREADS" not in os.environ


@pytest.mark.slow
def test_the_command_with_two_jobs(tmp_path):
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    (tmp_path / "space.yaml").write_text(
        "parameters:\n  model.init_args.client.init_args.lr: {kind: log_float, low: 1e-3, high: 0.1}\n"
    )
    command = [
        sys.executable, "-m", "fedclust", "tune", "--config", "local_only_digits", "--space", "space.yaml",
        "--trials", "3", "--jobs", "2", "--objective", "loss", "--repeats", "0", "--no-figures",
        "--trainer.max_epochs=1", "--storage", "sqlite:///study.db",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "3 of 3: 3 complete" in done.stdout
    assert (tmp_path / "study.db").is_file()
    assert done.stdout.splitlines()[-1] == "study: runs/tune_local_only_digits"
