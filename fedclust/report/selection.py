"""Which metric selects the best round, whether it uses labels, and the checkpoints that follow from it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint

LABEL_METRICS = frozenset({"acc", "nmi", "ari"})
CLUSTERING_MONITOR = ("val/dbi", "min")


@dataclass(frozen=True)
class Monitor:
    """A metric and its mode, "min" or "max"."""

    name: str
    mode: str


def choose_monitor(model: pl.LightningModule, callbacks: Iterable[Callback]) -> Monitor:
    """The metric that selects the best round.

    In this order: that of a configured ModelCheckpoint, that of a configured EarlyStopping, the method's own
    `default_monitor`, the validation Davies-Bouldin index.
    """
    kinds: tuple[type[Any], ...] = (ModelCheckpoint, EarlyStopping)
    configured = list(callbacks)
    for kind in kinds:
        for callback in configured:
            if isinstance(callback, kind) and callback.monitor:
                return Monitor(str(callback.monitor), str(callback.mode))
    own = getattr(getattr(model, "algorithm", model), "default_monitor", CLUSTERING_MONITOR)
    return Monitor(*own)


def uses_labels(model: pl.LightningModule, monitor: str) -> bool:
    """Whether a monitor needs labels."""
    algorithm = getattr(model, "algorithm", None)
    if algorithm is not None and hasattr(algorithm, "uses_labels"):
        return bool(algorithm.uses_labels(monitor))
    return monitor.rpartition("/")[2] in LABEL_METRICS


class LastCheckpoint(ModelCheckpoint):
    """Writes `last.ckpt` at the end of every round, whatever the metrics.

    Args:
        directory: Where the file goes.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__(
            dirpath=str(directory),
            filename="last",
            save_top_k=1,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes nothing over: the file of the run that is resumed stays there."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes the file of a resumed run that had no round left to do, so that it can be resumed in turn."""
        path = Path(str(self.dirpath)) / "last.ckpt"
        if not path.exists() and not getattr(trainer, "fast_dev_run", False):
            trainer.save_checkpoint(path)


class BestCheckpoint(ModelCheckpoint):
    """Keeps `best.ckpt`, the round with the best value of a monitor.

    Unlike its base it goes on with the best score of the run that it resumes: `best.ckpt` of that run is copied into
    the new directory.

    Args:
        directory: Where the file goes.
        monitor: Metric that selects the best round.
        mode: "min" or "max".

    Attributes:
        begins_anew: Whether the run that is resumed selected by another monitor, so that its rounds do not count.
    """

    def __init__(self, directory: str | Path, monitor: str, mode: str = "min") -> None:
        super().__init__(
            dirpath=str(directory),
            filename="best",
            monitor=monitor,
            mode=mode,
            save_top_k=1,
            auto_insert_metric_name=False,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self._inherited: dict[str, Any] | None = None
        self.begins_anew = False

    def check_monitor_top_k(self, trainer: pl.Trainer, current: torch.Tensor | None = None) -> bool:
        """Whether a round's value is the best so far; of rounds without a finite one the latest counts as best."""
        best = self.best_model_score
        if best is not None and current is not None and not torch.isfinite(best):
            return True
        return super().check_monitor_top_k(trainer, current)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state of the resumed run for `on_fit_start`, when the directory is known to be in use."""
        self._inherited = state_dict

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes over the best checkpoint of the run that is resumed."""
        state, self._inherited = self._inherited, None
        self.begins_anew = state is None and trainer.ckpt_path is not None
        if state is None or not state["best_model_path"] or state["best_model_score"] is None:
            return
        resumed = Path(str(trainer.ckpt_path)) if trainer.ckpt_path else None
        recorded = Path(state["best_model_path"])
        beside = resumed.parent / recorded.name if resumed is not None else recorded
        source = beside if beside.is_file() else recorded
        if not source.is_file():
            return
        target = Path(str(self.dirpath)) / source.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target != source:
            shutil.copyfile(source, target)
        score = state["best_model_score"]
        self.best_model_path = self.kth_best_model_path = str(target)
        self.best_model_score = self.kth_value = score
        self.best_k_models = {str(target): score}


def checkpoint_round(path: str | Path) -> int:
    """The round that a checkpoint written during training was written in."""
    return int(torch.load(path, map_location="cpu", weights_only=True)["epoch"]) + 1


def best_checkpoint(trainer: pl.Trainer) -> Path | None:
    """The best checkpoint of a run by its monitor, or None if none was written."""
    for callback in sorted(trainer.checkpoint_callbacks, key=lambda entry: not isinstance(entry, BestCheckpoint)):
        if isinstance(callback, ModelCheckpoint) and callback.monitor and callback.best_model_path:
            path = Path(callback.best_model_path)
            if path.is_file():
                return path
    return None
