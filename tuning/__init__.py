"""Optuna studies over federated runs.

Names are imported on first use, as in `fedclust`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuning.objectives import NoSuchMetricError, Objective
    from tuning.space import Space, load_space, shipped_spaces
    from tuning.storage import StorageError
    from tuning.study import NoBestTrialError, Study, StudyResult
    from tuning.workers import WorkerError

_HOMES = {
    "NoBestTrialError": "tuning.study",
    "NoSuchMetricError": "tuning.objectives",
    "Objective": "tuning.objectives",
    "Space": "tuning.space",
    "StorageError": "tuning.storage",
    "Study": "tuning.study",
    "StudyResult": "tuning.study",
    "WorkerError": "tuning.workers",
    "load_space": "tuning.space",
    "shipped_spaces": "tuning.space",
}

__all__ = [
    "NoBestTrialError",
    "NoSuchMetricError",
    "Objective",
    "Space",
    "StorageError",
    "Study",
    "StudyResult",
    "WorkerError",
    "load_space",
    "shipped_spaces",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tuning' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
