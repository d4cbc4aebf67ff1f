from __future__ import annotations

import math

import pytest

from fedclust.report.summary import empty_summary, totals, versions
from fedclust.report.table import human_bytes, metrics_table, number, results_table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (12_340_000, "12.3 MB"),
        (5 * 10**9, "5.0 GB"),
        (7 * 10**15, "7000.0 TB"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.83456, "0.8346"),
        (10.0, "10"),
        (0.0, "0.0000"),
        (1e-5, "1e-05"),
        (-0.00012, "-0.00012"),
        (0.0006, "0.0006"),
        (1.0, "1.0000"),
        (math.inf, "inf"),
        (None, "not a number"),
        ("inf", "inf"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_totals_over_actions():
    assert totals({"update": {"up": 3, "down": 5}, "evaluate": {"up": 1, "down": 0}}) == (4, 5)


def test_results_table_has_everything_and_is_aligned():
    summary = empty_summary("fit", None)
    summary.update(
        method="FedDCN",
        source="digits",
        clients=5,
        rounds=20,
        seed=0,
        status="stopped early",
        monitor="val/acc",
        monitor_mode="max",
        uses_labels=True,
        selected="best",
        selected_round=7,
        notes=["client 3 is empty"],
        metrics={"test/acc": 0.8, "test/populated": 9.0, "test/dbi": math.inf, "val/acc": 0.9, "test/other": 2.5},
        bytes={"update": {"up": 1_500_000, "down": 2_000_000_000}},
        seconds={"local": 12.34, "train": 1.0},
    )
    lines = results_table(summary).splitlines()
    assert lines[0] == "FedDCN on digits, 5 clients, 20 rounds, seed 0, stopped early"
    cells = {" ".join(line.split("  ")[1:2]): line for line in lines[2:-1]}
    assert cells["test/acc"].split()[1] == "0.8000"
    assert cells["test/dbi"].split()[1] == "inf"
    assert cells["test/populated"].split()[1] == "9"
    assert cells["test/other"].split()[1] == "2.5000"
    assert "1.5 MB" in cells["bytes up"]
    assert "2.0 GB" in cells["bytes down"]
    assert "12.3" in cells["seconds local"]
    assert cells["monitor"].endswith("uses labels; best round 7")
    assert lines[-1] == "  note: client 3 is empty"
    assert not any(name.startswith("val/") for name in cells)
    ends = {
        line.index(value) + len(value)
        for line, value in ((cells["test/acc"], "0.8000"), (cells["test/dbi"], " inf"), (cells["bytes up"], "1.5 MB"))
    }
    assert len(ends) == 1


def test_metrics_table_says_what_was_evaluated():
    summary = empty_summary("validate", None)
    summary.update(method="FedDCN", source="digits", seed=3, metrics={"val/acc": 0.5, "val/other": 2.0})
    lines = metrics_table(summary).splitlines()
    assert lines[0] == "validate: FedDCN on digits, seed 3"
    assert lines[2].split() == ["val/acc", "0.5000", "accuracy", "(one-to-one)"]
    assert lines[3].split() == ["val/other", "2"]


def test_versions_name_all_packages():
    found = versions()
    assert all(found[name][0].isdigit() for name in ("fedclust", "python", "torch", "pytorch_lightning", "numpy"))


def test_numbers_of_clusters_are_whole_numbers():
    summary = empty_summary("fit", None)
    summary.update(method="FMCL", metrics={"clusters/pre": 1.0, "clusters/final": 3.0, "privacy/delta": 1e-5})
    values = {line.split()[0]: line.split()[1] for line in results_table(summary).splitlines() if "/" in line}
    assert values == {"clusters/pre": "1", "clusters/final": "3", "privacy/delta": "1e-05"}
