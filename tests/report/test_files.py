from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from fedclust.report.files import write_csv, write_json, write_text
from fedclust.report.rundir import RunDirectory, run_of_checkpoint


def test_json_is_strict(tmp_path):
    value = {
        "nan": math.nan,
        "up": math.inf,
        "down": -math.inf,
        "n": np.int64(3),
        "x": np.float32(0.5),
        1: (1, None, True),
        "tensor": torch.tensor([1.0, math.nan]),
        "path": Path("a/b"),
    }
    write_json(tmp_path / "s.json", value)
    text = (tmp_path / "s.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text) == {
        "nan": None,
        "up": "inf",
        "down": "-inf",
        "n": 3,
        "x": 0.5,
        "1": [1, None, True],
        "tensor": [1.0, None],
        "path": "a/b",
    }


def test_csv_keeps_columns_and_missing_values(tmp_path):
    write_csv(tmp_path / "m.csv", [{"round": 1, "a": 0.1}, {"round": 2, "b": math.nan}], ["round", "a", "b"])
    assert (tmp_path / "m.csv").read_text() == "round,a,b\n1,0.1,\n2,,nan\n"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "summary.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \udc80")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_directories_made_at_once_differ(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: RunDirectory.create(tmp_path, "digits").path, range(40)))
    assert sorted(int(path.name.removeprefix("version_")) for path in made) == list(range(40))


def test_a_free_number_below_a_used_one_is_not_taken(tmp_path):
    (tmp_path / "digits" / "version_7").mkdir(parents=True)
    (tmp_path / "digits" / "notes").mkdir()
    assert RunDirectory.create(tmp_path, "digits").path.name == "version_8"


def test_only_empty_directories_are_removed(tmp_path):
    empty, full = RunDirectory.create(tmp_path / "runs", "a"), RunDirectory.create(tmp_path / "runs", "b")
    empty.checkpoints.mkdir()
    (full.path / "config.yaml").write_text("x")
    assert empty.remove_if_empty()
    assert not (tmp_path / "runs" / "a").exists()
    assert not full.remove_if_empty()
    assert (full.path / "config.yaml").is_file()


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "ä"])
def test_names_are_checked(tmp_path, name):
    with pytest.raises(ValueError, match="name must be made of"):
        RunDirectory.create(tmp_path, name)


def test_a_root_that_is_a_file_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ValueError, match="runs_root"):
        RunDirectory.create(tmp_path / "runs", "digits")


def test_run_of_a_checkpoint(tmp_path):
    run = tmp_path / "version_0"
    (run / "checkpoints").mkdir(parents=True)
    assert run_of_checkpoint(run / "checkpoints" / "best.ckpt") is None
    (run / "config.yaml").write_text("")
    assert run_of_checkpoint(run / "checkpoints" / "best.ckpt") == run
