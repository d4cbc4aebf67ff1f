"""The benchmark scripts import each other by plain names, as Python finds them when a script is run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _as_when_a_script_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts' folder is on the path; what a script changes in this process is put back."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads, lightning = torch.get_num_threads(), logging.getLogger("pytorch_lightning")
    level = lightning.level
    yield
    torch.set_num_threads(threads)
    lightning.setLevel(level)
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]
