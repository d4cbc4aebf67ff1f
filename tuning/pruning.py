"""What a trial tells after every round, and how it is stopped."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from fedclust.report.recorder import RunStopped
from tuning.objectives import NoSuchMetricError, Objective, value_of

OnRound = Callable[[int, list[float | None]], bool]


class Pruned(RunStopped):
    """The study stopped a hopeless trial after a round."""

    status = "pruned"

    def __init__(self, number: int) -> None:
        super().__init__(f"pruned after round {number}")
        self.round = number


class RoundReporter(Callback):
    """Hands the objectives' values of every round on, and ends the run where it is told to.

    Args:
        objectives: The study's objectives.
        terms: The metrics that make up "loss".
        on_round: Called with the round's number and the objectives' values, None for one that was not logged; says
            whether the run is hopeless.
    """

    def __init__(self, objectives: tuple[Objective, ...], terms: tuple[str, ...], on_round: OnRound) -> None:
        self.objectives = objectives
        self.terms = terms
        self.on_round = on_round
        self._validated = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes that this round was validated: values of an earlier round do not count for it."""
        self._validated = not trainer.sanity_checking

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One round is done and evaluated.

        Raises:
            Pruned: If the run is hopeless.
            NoSuchMetricError: If the first round logged none of an objective's metrics, nor would any other.
        """
        source: Mapping[str, Any] = getattr(pl_module, "latest", None) or trainer.callback_metrics
        stale = () if self._validated else ("val/",)
        metrics = {str(name): float(value) for name, value in source.items() if not str(name).startswith(stale)}
        self._validated = False
        number = trainer.current_epoch + 1
        values = [value_of(objective, metrics, self.terms) for objective in self.objectives]
        if number == 1:
            self._check(metrics, values, trainer)
        if self.on_round(number, values):
            raise Pruned(number)

    def _check(self, metrics: Mapping[str, float], values: list[float | None], trainer: pl.Trainer) -> None:
        every = getattr(trainer, "check_val_every_n_epoch", 1) or 1
        for objective, value in zip(self.objectives, values, strict=True):
            validated = every == 1 or not objective.name.startswith("val/")
            if value is None and validated and not _known(trainer, objective.name):
                there = ", ".join(sorted(name for name in metrics if name.startswith(("val/", "train/"))))
                raise NoSuchMetricError(f"objective {objective.name!r} was not logged by round 1; there are {there}")


def _known(trainer: pl.Trainer, name: str) -> bool:
    """Whether the method lists the metric, so that it is only missing in this round or trial."""
    algorithm: Any = getattr(trainer.lightning_module, "algorithm", None)
    names = frozenset() if algorithm is None else algorithm.metric_names(True)
    return name in names or (name == "loss" and bool(names))


def for_pruner(objective: Objective, value: float | None) -> float | None:
    """The value that the pruner sees: a round without a finite value is as bad as can be; None is not reported."""
    if value is None:
        return None
    return value if math.isfinite(value) else objective.worst
