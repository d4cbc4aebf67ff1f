"""The summary of a run: what was reached, by which monitor, at what cost, with which versions."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypedDict

PACKAGES = ("torch", "pytorch-lightning", "numpy", "scikit-learn", "umap-learn")


class Summary(TypedDict):
    """Contents of summary.json. Not-a-number is written as null, infinities as "inf" and "-inf".

    Attributes:
        command: "fit", "validate", "test" or "predict".
        method: The method's class.
        source: Name of the data source.
        clients: Number of clients; None for a central run.
        metrics: Metrics of the selected round, and `test/…` where the test split was evaluated.
        monitor: Metric that selects the best round; None if there is none.
        monitor_mode: "min" or "max".
        uses_labels: Whether the monitor needs labels.
        selected: "best" or "last": which checkpoint the metrics are of.
        selected_round: Its round.
        bytes: {action: {"up": bytes, "down": bytes}} of the whole run.
        seconds: Seconds per stage.
        rounds: Rounds done (epochs of a central run), those of resumed runs included.
        seed: The run's seed.
        versions: Versions of the packages that can change a result.
        status: "running", "completed", "stopped early", "interrupted", "pruned" (a hopeless trial of a study) or
            "failed"; a killed run stays "running".
        error: What made it fail, or None.
        failures: Clients' failures that the policy passed over.
        notes: Sentences that belong to the result.
        parent: Run directory or checkpoint that this run goes on from, or None.
        checkpoint: Path of the best checkpoint, relative to the run directory where it lies inside; or None.
    """

    command: str
    method: str
    source: str | None
    clients: int | None
    metrics: dict[str, float]
    monitor: str | None
    monitor_mode: str | None
    uses_labels: bool | None
    selected: str | None
    selected_round: int | None
    bytes: dict[str, dict[str, int]]
    seconds: dict[str, float]
    rounds: int
    seed: int | None
    versions: dict[str, str]
    status: str
    error: str | None
    failures: list[dict[str, Any]]
    notes: list[str]
    parent: str | None
    checkpoint: str | None


def empty_summary(command: str, parent: str | None) -> Summary:
    """A summary before anything happened."""
    return Summary(
        command=command,
        method="",
        source=None,
        clients=None,
        metrics={},
        monitor=None,
        monitor_mode=None,
        uses_labels=None,
        selected=None,
        selected_round=None,
        bytes={},
        seconds={},
        rounds=0,
        seed=None,
        versions=versions(),
        status="running",
        error=None,
        failures=[],
        notes=[],
        parent=parent,
        checkpoint=None,
    )


def versions() -> dict[str, str]:
    """Versions of Python, this package and the packages that can change a result."""
    import fedclust

    found = {"python": platform.python_version(), "fedclust": fedclust.__version__}
    for package in PACKAGES:
        try:
            found[package.replace("-", "_") if package == "pytorch-lightning" else package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def totals(counts: Mapping[str, Mapping[str, int]]) -> tuple[int, int]:
    """Bytes up and down over all actions."""
    return sum(both["up"] for both in counts.values()), sum(both["down"] for both in counts.values())


@dataclass(frozen=True)
class Counts:
    """Bytes per action and seconds per stage."""

    bytes: dict[str, dict[str, int]]
    seconds: dict[str, float]


def counts(module: Any) -> Counts:
    """What a federated loop has counted so far; nothing of any other module."""
    if not hasattr(module, "byte_counts"):
        return Counts({}, {})
    return Counts(module.byte_counts(), dict(module.seconds))
