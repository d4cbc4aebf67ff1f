"""What the reproductions share: versions, skipped and resumed runs, quiet trainers, cells of tables."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytorch_lightning as pl
import torch

from fedclust.federation.context import emulated
from fedclust.report.selection import LastCheckpoint

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "benchmarks" / "work"


VERSIONS = ("torch", "pytorch-lightning", "numpy", "scipy", "scikit-learn", "numba")


def versions(names: Iterable[str] = VERSIONS) -> dict[str, str | None]:
    """Versions of what the figures depend on, None where it is not installed, and the commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {"python": platform.python_version(), "commit": commit, **{name: installed(name) for name in names}}


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Cores and present load, for figures of time."""
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {"cores": os.cpu_count(), "load at the start": load}


def fast_precision() -> str:
    """bf16-mixed where this CPU has the instructions for it, else float32."""
    return "32-true" if emulated(torch.device("cpu"), "bf16-mixed") else "bf16-mixed"


def words(text: str) -> list[str]:
    """A comma-separated option."""
    return [part for part in text.split(",") if part]


def integers(text: str) -> list[int]:
    """A comma-separated option of whole numbers."""
    return [int(part) for part in words(text)]


def decimals(text: str) -> list[float]:
    """A comma-separated option of numbers."""
    return [float(part) for part in words(text)]


def quiet() -> None:
    """Silences warnings and Lightning's own lines."""
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


def run_once(path: Path, work: Path, run: Callable[[Path], dict[str, Any]]) -> dict[str, Any] | None:
    """Runs what the JSON at `path` does not hold yet and writes it; None if it was there.

    Args:
        path: The JSON.
        work: Parent of the folder that the run keeps its checkpoints in until its JSON is written.
        run: Takes that folder and returns what the JSON holds.
    """
    if path.exists():
        print(f"{path.name} exists, skipped")
        return None
    folder = work / path.stem
    result = run(folder)
    write_json(path, result)
    shutil.rmtree(folder, ignore_errors=True)
    return result


def write_json(path: Path, value: Any) -> None:
    """Writes the file as a whole or not at all: a half-written JSON would count as a finished run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1, allow_nan=True) + "\n")
    part.replace(path)


def make_trainer(rounds: int, precision: str, work: Path, callbacks: Sequence[pl.Callback]) -> pl.Trainer:
    """A Trainer on the CPU that prints nothing and keeps its last round."""
    return pl.Trainer(
        max_epochs=rounds, accelerator="cpu", precision=precision, logger=False, default_root_dir=work,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[*callbacks, LastCheckpoint(work)],
    )  # fmt: skip


def checkpoint_in(work: Path) -> Path | None:
    """The checkpoint that an interrupted run goes on from."""
    return next((path for path in (work / "last.ckpt", work / "start.ckpt") if path.is_file()), None)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± sample standard deviation; the value alone if there is one."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def row(cells: Iterable[Any]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def heading(names: Iterable[str]) -> list[str]:
    """The lines that begin a Markdown table."""
    names = list(names)
    return [row(names), "|" + "---|" * len(names)]
