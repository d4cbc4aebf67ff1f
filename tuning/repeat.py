"""The best configuration again under other seeds: the only place of a study that reads the test split."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedclust.directions import better
from fedclust.report.files import write_json
from tuning.blueprint import Blueprint, digest
from tuning.parameters import Value
from tuning.trial import COMPLETE, Runner

_SHOWN = ("val/", "test/")
_NOT_SHOWN = ("latent_variance", "collapsed", "auc_users")


def repeat_best(
    runner: Runner, values: Mapping[str, Value], seeds: Sequence[int], say: Callable[[str], None]
) -> dict[str, Any]:
    """Runs a configuration under each seed and writes repeats.json; what is there already is not run again.

    Args:
        runner: Runs configurations.
        values: The best trial's parameters.
        seeds: Seeds.
        say: Told what is being done.

    Returns:
        {"params", "digest", "runs": one per seed, "table": metric → mean, sd, best, n}. The file also has, under
        "other_runs", those of seeds that were asked for at another time.
    """
    path = runner.directory / "repeats.json"
    key = _key(runner.blueprint, values)
    set_aside(runner.directory, runner.blueprint, values)
    runs = {run["seed"]: run for run in _finished(path, key)}
    for seed in seeds:
        if seed not in runs:
            say(f"best configuration, seed {seed}")
            outcome = runner.repeat(values, f"repeat_seed_{seed}", seed)
            status = "completed" if outcome.state == COMPLETE else "failed"
            runs[seed] = {
                "seed": seed, "status": status, "error": outcome.detail, "metrics": _shown(outcome.metrics),
                "directory": outcome.directory, "seconds": outcome.seconds,
            }  # fmt: skip
        asked = [runs[number] for number in seeds if number in runs]
        others = [run for number, run in sorted(runs.items()) if number not in seeds]
        report = {"params": dict(values), "digest": key, "runs": asked, "table": spread(asked)}
        write_json(path, {**report, "other_runs": others} if others else report)
    return report if seeds else {"params": dict(values), "digest": key, "runs": [], "table": {}}


def set_aside(directory: Path, blueprint: Blueprint, values: Mapping[str, Value]) -> None:
    """Renames a repeats.json of other parameters than the best ones, which would pass for theirs."""
    path = directory / "repeats.json"
    before = _read(path).get("digest")
    if before is not None and before != _key(blueprint, values):
        path.replace(directory / f"repeats_{before}.json")


def spread(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean, sample standard deviation (None for one run) and best of every metric over the completed runs."""
    done = [run["metrics"] for run in runs if run["status"] == "completed"]
    table: dict[str, dict[str, Any]] = {}
    for name in sorted({name for metrics in done for name in metrics}):
        found = [float(metrics[name]) for metrics in done if metrics.get(name) is not None]
        if not found:
            continue
        mode = better(name)
        finite = all(map(math.isfinite, found))
        table[name] = {
            "mean": fmean(found) if finite else math.nan,
            "sd": stdev(found) if finite and len(found) > 1 else None,
            "best": None if mode is None else min(found) if mode == "min" else max(found),
            "n": len(found),
        }
    return table


def repeats_table(report: Mapping[str, Any], label_metrics: Sequence[str]) -> list[str]:
    """The table that is printed; metrics that need labels are marked."""
    if not report["table"]:
        return []
    rows: list[tuple[str, ...]] = [("metric", "mean", "sd", "best", "")]
    for name, entry in report["table"].items():
        numbers = [_number(entry[column]) for column in ("mean", "sd", "best")]
        labels = "uses labels" if name.rpartition("/")[2] in label_metrics else ""
        rows.append((name, *numbers, labels))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for row in rows:
        figures = "  ".join(f"{row[column]:>{widths[column]}}" for column in (1, 2, 3))
        lines.append(f"  {row[0]:<{widths[0]}}  {figures}  {row[4]}".rstrip())
    failed = [str(run["seed"]) for run in report["runs"] if run["status"] != "completed"]
    if failed:
        lines.append(f"  note: seeds {', '.join(failed)} failed; repeats.json says why")
    return lines


def _key(blueprint: Blueprint, values: Mapping[str, Value]) -> str:
    return digest({**blueprint.described(), "params": dict(values)})


def _read(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _finished(path: Path, key: str) -> list[dict[str, Any]]:
    saved = _read(path)
    runs = [*saved.get("runs", []), *saved.get("other_runs", [])] if saved.get("digest") == key else []
    return [run for run in runs if run["status"] == "completed"]


def _shown(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if name.startswith(_SHOWN) and not name.endswith(_NOT_SHOWN)
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
