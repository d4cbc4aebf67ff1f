"""A study whose runs are functions, so that what is tested is the study; and a real one that is as small as can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedclust.cli import main
from fedclust.clustering import geometry
from tuning.blueprint import Blueprint
from tuning.ledger import Ledger, Settings
from tuning.objectives import parse_objectives
from tuning.pruning import OnRound
from tuning.space import parse_space
from tuning.storage import StorageName
from tuning.trial import Outcome

SPACE: dict[str, Any] = {
    "parameters": {
        "model.x": {"kind": "float", "low": -1, "high": 1},
        "model.kind": {"kind": "categorical", "choices": ["flat", "steep"]},
        "model.power": {"kind": "int", "low": 1, "high": 4, "when": {"kind": ["steep"]}},
    }
}
BINARY: dict[str, Any] = {
    "parameters": {
        "model.a": {"kind": "categorical", "choices": [True, False]},
        "model.b": {"kind": "categorical", "choices": [True, False]},
    }
}
Run = Callable[[Mapping[str, Any], str, OnRound], Outcome]


def bowl(values: Mapping[str, Any], name: str, on_round: OnRound) -> Outcome:
    """Two rounds; the value is least at x = 0.3, the flat kind."""
    value = (values["x"] - 0.3) ** 2 * values.get("power", 1) + (values["kind"] == "steep")
    for number in (1, 2):
        if on_round(number, [value + 1 / number]):
            return Outcome("pruned", rounds=number)
    return Outcome("complete", (value,), metrics={"val/dbi": value}, rounds=2)


@dataclass
class FakeRunner:
    """Stands for `tuning.trial.Runner`."""

    run: Run = bowl
    ran: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    shared: Any = field(
        default_factory=lambda: SimpleNamespace(
            counts=lambda: {"embeddings_reused": 0, "embeddings_computed": 0, "data_reused": 0}
        )
    )

    def trial(self, values: Mapping[str, Any], name: str, on_round: OnRound) -> Outcome:
        self.ran.append((name, dict(values)))
        return self.run(values, name, on_round)


def _blueprint(space: Mapping[str, Any] = SPACE, objective: str = "dbi", seed: int = 0, **more: Any) -> Blueprint:
    objectives = parse_objectives(objective)
    entries: dict[str, Any] = {
        "labels": (False,) * len(objectives),
        "terms": ("train/loss",),
        "config": {"trainer": {"max_epochs": 2}, "seed_everything": 0},
    }
    return Blueprint(
        text="trainer: {max_epochs: 2}\n", space=parse_space(space, "space"), objectives=objectives, seed=seed,
        runs_root="runs", name="toy", monitor="val/dbi", **{**entries, **more},
    )  # fmt: skip


@pytest.fixture
def blueprint() -> Callable[..., Blueprint]:
    return _blueprint


@pytest.fixture
def runner() -> type[FakeRunner]:
    return FakeRunner


@pytest.fixture
def binary() -> dict[str, Any]:
    return BINARY


@pytest.fixture
def ledger(tmp_path: Path) -> Callable[..., Ledger]:
    """Opens a study in a temporary directory; the same study each time unless `name` says otherwise."""

    def make(
        space: Mapping[str, Any] = SPACE, storage: str | None = None, name: str = "toy", objective: str = "dbi",
        seed: int = 0, more: Mapping[str, Any] | None = None, **settings: Any,
    ) -> Ledger:  # fmt: skip
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        chosen = StorageName.of(storage, directory)
        plan = _blueprint(space, objective, seed, **(more or {}))
        return Ledger(name, chosen, directory, plan, Settings(**settings))

    return make


@pytest.fixture
def quick_umap(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces UMAP by something quick that depends on the same things; counts how often it is computed."""
    computed: list[int] = []

    def fit(rows: np.ndarray, settings: Mapping[str, Any], seed: int) -> tuple[np.ndarray, str]:
        computed.append(seed)
        draws = np.random.default_rng(seed).normal(size=(rows.shape[1], settings["n_components"]))
        return (rows @ draws).astype(np.float32), "spectral"

    monkeypatch.setattr(geometry, "_fit", fit)
    return computed


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_umap: list[int]) -> None:
    """Runs in a temporary directory, on one thread, with a quick UMAP."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCLUST_DEBUG", raising=False)
    torch.set_num_threads(1)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `fedclust tune`; returns exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["tune", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
