"""Repetition over seeds: mean, sample deviation and best; what is finished is not run again."""

from __future__ import annotations

import json

import pytest

from tuning.repeat import repeat_best, repeats_table, set_aside, spread
from tuning.trial import Outcome


class Repeats:
    """Stands for `tuning.trial.Runner`; seed 2 fails the first time."""

    def __init__(self, blueprint, directory):
        self.blueprint, self.directory = blueprint, directory
        self.asked: list[int] = []
        self.failing = {2}

    def repeat(self, values, name, seed):
        self.asked.append(seed)
        assert name == f"repeat_seed_{seed}"
        if seed in self.failing:
            return Outcome("failed", reason="error", detail="ValueError: no luck")
        metrics = {"val/dbi": 1.0 + seed, "test/acc": 0.5 + seed / 10, "train/loss": 3.0, "test/collapsed": 0.0}
        return Outcome("complete", (), metrics=metrics, directory=f"runs/{name}")


@pytest.fixture
def runs(blueprint, tmp_path):
    return Repeats(blueprint(), tmp_path)


def test_statistics_by_hand():
    runs = [{"status": "completed", "metrics": {"test/acc": value, "val/dbi": value}} for value in (1.0, 2.0, 6.0)]
    table = spread([*runs, {"status": "failed", "metrics": {"test/acc": 99.0}}])
    assert table["test/acc"] == {"mean": 3.0, "sd": pytest.approx(7**0.5), "best": 6.0, "n": 3}
    assert table["val/dbi"]["best"] == 1.0
    assert spread(runs[:1])["test/acc"] == {"mean": 1.0, "sd": None, "best": 1.0, "n": 1}


def test_finished_seeds_are_not_run_again(runs, tmp_path):
    report = repeat_best(runs, {"x": 1}, range(4), lambda text: None)
    assert runs.asked == [0, 1, 2, 3]
    assert [run["status"] for run in report["runs"]] == ["completed", "completed", "failed", "completed"]
    assert set(report["table"]) == {"val/dbi", "test/acc"}
    assert report["table"]["val/dbi"]["n"] == 3
    assert json.loads((tmp_path / "repeats.json").read_text()) == report
    assert "seeds 2 failed" in "\n".join(repeats_table(report, ["acc"]))
    runs.failing = set()
    report = repeat_best(runs, {"x": 1}, range(5), lambda text: None)
    assert runs.asked == [0, 1, 2, 3, 2, 4]
    assert report["table"]["val/dbi"] == {"mean": 3.0, "sd": pytest.approx(2.5**0.5), "best": 1.0, "n": 5}
    repeat_best(runs, {"x": 2}, range(1), lambda text: None)
    assert runs.asked[-1] == 0


def test_a_damaged_file_is_written_anew(runs, tmp_path):
    (tmp_path / "repeats.json").write_text("{")
    assert repeat_best(runs, {"x": 1}, range(1), lambda text: None)["table"]["test/acc"]["mean"] == 0.5


def test_the_table_marks_labels(runs):
    lines = repeats_table(repeat_best(runs, {"x": 1}, range(2), lambda text: None), ["acc"])
    assert any("test/acc" in line and line.endswith("uses labels") for line in lines)
    assert any("val/dbi" in line and not line.endswith("labels") for line in lines)


def test_fewer_seeds_than_before_forget_none(runs, tmp_path):
    repeat_best(runs, {"x": 1}, range(2), lambda text: None)
    runs.failing = set()
    repeat_best(runs, {"x": 1}, range(4), lambda text: None)
    few = repeat_best(runs, {"x": 1}, (1, 4), lambda text: None)
    assert [run["seed"] for run in few["runs"]] == [1, 4]
    assert few["table"]["val/dbi"]["n"] == 2
    assert repeat_best(runs, {"x": 1}, range(5), lambda text: None)["table"]["val/dbi"]["n"] == 5
    assert runs.asked == [0, 1, 2, 3, 4]
    assert "other_runs" not in json.loads((tmp_path / "repeats.json").read_text())


def test_repeats_of_another_best_trial_are_set_aside(runs, tmp_path):
    old = repeat_best(runs, {"x": 1}, range(2), lambda text: None)
    set_aside(tmp_path, runs.blueprint, {"x": 1})
    assert (tmp_path / "repeats.json").is_file()
    set_aside(tmp_path, runs.blueprint, {"x": 2})
    assert not (tmp_path / "repeats.json").exists()
    assert json.loads((tmp_path / f"repeats_{old['digest']}.json").read_text()) == old
    set_aside(tmp_path, runs.blueprint, {"x": 2})
