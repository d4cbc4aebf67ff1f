"""What the benchmarks' tables and verdicts say, worked out by hand."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedclust.federation.errors import ClientError, Failure, NonFiniteLossError, NonFiniteOutputsError
from fedclust.privacy.importance import top_k_indices


def lines_of(text: str) -> list[list[str]]:
    """The cells of every line of a Markdown table."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def test_distances_are_compared_with_their_own_kind_and_per_core() -> None:
    table = importlib.import_module("distances_table")
    rows = [
        {"what": "fedclust dtw, 1 thread", "seconds": 2.0, "pairs timed": 3},
        {"what": "fedclust dtw, 2 threads", "seconds": 1.0, "pairs timed": 3},
        {"what": "fedclust fastdtw, 1 thread", "seconds": 0.5, "pairs timed": 3},
        {"what": "PyPI fastdtw, radius 1", "seconds": 20.0, "pairs timed": 1},
        {"what": "dtaidistance, C", "seconds": 6.0, "pairs timed": 1},
        {"what": "tslearn: not installed"},
    ]
    one, two, fast, pypi, exact, absent = table.compared(rows, n=3, k=10)
    assert one["cells/s/core"] == two["cells/s/core"] == 3 * 100 / 2
    assert exact["cells/s/core"] == 50
    assert "cells/s/core" not in fast
    assert (pypi["result"], pypi["times ours"]) == ("approximate", 40)
    assert (exact["result"], exact["times ours"]) == ("exact", 3)
    assert absent == {"what": "tslearn: not installed"}
    without = table.compared([rows[0], rows[3]], n=3, k=10)
    assert "times ours" not in without[1]


def run_of(seed: int, rounds: int, commit: str, precision: str, machine: dict[str, Any] | None = None) -> dict:
    """A run of 30 rounds that ended after `rounds`."""
    diverged = {"round": rounds + 1, "error": "…"} if rounds < 30 else None
    figures = {"acc_mean": 0.5, "acc_worst": 0.25, "f1_macro": 0.5, "auc": 0.75}
    bound = {"smallest": "pure", "delta": 1e-5}
    return {
        "dataset": "mnist", "partition": "set2", "row": "all_three", "rounds": 30, "seed": seed, "varied": {},
        "diverged": diverged, "final": None if diverged else figures, "best_by_val": figures,
        "privacy": {"rounds": rounds, "round": {**bound, "epsilon": 4.0}, "total": {**bound, "epsilon": 4.0 * rounds}},
        "seconds": 100.0, "stages": {"train": 80.0, "test": 20.0}, "history": [],
        "settings": {"epsilon": 1.0, "precision": precision, "threads": 1},
        "versions": {"commit": commit, "python": "3", "torch": "2", "numpy": "2"},
        **({"machine": machine} if machine else {}),
    }  # fmt: skip


def test_pa_cfl_says_which_versions_stand_in_a_row_and_what_an_epsilon_covers(tmp_path: Path) -> None:
    table = importlib.import_module("pa_cfl_table")
    busy = {"cores": 2, "load at the start": 1.5}
    runs = [run_of(0, 2, "aaa", "32-true"), run_of(1, 1, "bbb", "bf16-mixed", busy)]
    for run in runs:
        (tmp_path / f"pa_cfl_mnist_{run['seed']}.json").write_text(json.dumps(run))
    heads, values, made_heads, *made = lines_of(table.write_table(tmp_path))
    row = dict(zip(heads, values))
    assert row["ε round / total (bound)"] == "4 (pure) / 8 (pure) after 2 rounds"
    assert (row["precision"], row["commit"]) == ("32-true, bf16-mixed", "aaa, bbb")
    assert row["seconds (test)"] == "100 (20)"
    found = [dict(zip(made_heads, line)) for line in made]
    assert [line["commit"] for line in found] == ["aaa", "bbb"]
    assert [line["load at the start"] for line in found] == ["not noted", "1.5 to 1.5"]
    assert [line["runs"] for line in found] == ["1", "1"]
    for name, run in (("0", run_of(0, 1, "aaa", "32-true")), ("1", run_of(1, 30, "aaa", "32-true"))):
        (tmp_path / f"pa_cfl_mnist_{name}.json").write_text(json.dumps(run))
    heads, values, *_ = lines_of(table.write_table(tmp_path))
    assert dict(zip(heads, values))["ε round / total (bound)"] == "4 (pure) / 120 (pure)"


def test_leakage_shows_a_best_image_only_of_several() -> None:
    table = importlib.import_module("leakage_report")
    rows = [{"image": n, "view": "guess", "mse": 0.25 + n / 2, "psnr": 3.0 + n, "ssim": 0.5 - n / 4} for n in (0, 1)]
    report = {"settings": {}, "versions": {"commit": "aaa"}, "rows": rows}
    both = lines_of(table.markdown(report, "x"))
    assert both[0][2:8] == ["MSE", "best MSE", "PSNR", "best PSNR", "SSIM", "best SSIM"]
    assert both[1][2:8] == ["0.5000", "0.2500", "3.5", "4.0", "0.375", "0.500"]
    single = lines_of(table.markdown({**report, "rows": rows[:1]}, "x"))
    assert single[0] == ["view", "k / d", "MSE", "PSNR", "SSIM", "labels found", "CPU s"]
    assert single[1][2:5] == ["0.2500", "3.0", "0.500"]


def overflow() -> Exception:
    """What the library says of a gradient that is not finite."""
    with pytest.raises(ValueError, match="infinite") as caught:
        top_k_indices([1.0, float("inf")], 1, who="client 3")
    return caught.value


@pytest.mark.parametrize(
    ("cause", "diverged"),
    [
        (NonFiniteLossError("client 3", 2, 0, float("nan"), 1.5), True),
        (NonFiniteOutputsError("client 3", 2, 5, 9), True),
        (overflow(), True),
        (ValueError("Input contains NaN."), False),
        (ValueError("the dominant class is missing"), False),
        (ValueError("client 3: 1 of 2 coordinates are NaN or infinite, and more"), False),
        (OSError("infinite loop of links"), False),
    ],
)
def test_only_the_librarys_own_errors_are_a_divergence(cause: Exception, diverged: bool) -> None:
    script = importlib.import_module("reproduce_pa_cfl")
    error = ClientError(Failure(3, 2, "describe", f"{type(cause).__name__}: {cause}", ""))
    error.__cause__ = cause
    assert script.not_finite(error) is diverged


def test_versions_of_what_is_not_installed_are_none() -> None:
    found = importlib.import_module("common").versions(("numpy", "no-such-package"))
    assert found["no-such-package"] is None
    assert re.match(r"\d+\.", found["numpy"])
