"""`RunRecorder`: writes what a run did into its directory, round by round."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities import rank_zero_warn

from fedclust.report.files import write_csv, write_json, write_text
from fedclust.report.pictures import draw_curve
from fedclust.report.selection import Monitor, best_checkpoint, checkpoint_round, choose_monitor, uses_labels
from fedclust.report.summary import Counts, counts, empty_summary

_OWN_ENTRY = ("bytes/", "seconds/", "test/")


class RunStopped(Exception):
    """A callback ends the run on purpose, without an error; the message becomes a note.

    Attributes:
        status: What summary.json says of the run.
    """

    status = "stopped early"


class RunRecorder(Callback):
    """Records a federated run, or a central run of a client module.

    Files: config.yaml, partition.json (client → rows), metrics.csv (one row a round), clients.csv (one row a client),
    summary.json. Nothing is written before the run has passed all checks. What was recorded travels in checkpoints,
    so that a resumed run's metrics.csv has all rounds.

    Args:
        directory: The run's directory; None keeps everything in memory.
        command: What is run: "fit", "validate", "test" or "predict".
        parent: Run directory or checkpoint that this run goes on from.
        config: The resolved configuration as YAML.
        monitor: Metric that selects the best round; None takes the one that the run's callbacks or method name.

    Attributes:
        history: One dict per round: "round" and the metrics.
        summary: What summary.json holds.
        started: Whether the run passed all checks and began.
    """

    def __init__(
        self,
        directory: str | Path | None,
        *,
        command: str = "fit",
        parent: str | None = None,
        config: str | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self.directory = None if directory is None else Path(directory)
        self.monitor = monitor
        self.history: list[dict[str, float]] = []
        self.summary = empty_summary(command, parent)
        self.started = False
        self._config = config
        self._record: dict[str, Any] = {}
        self._validated = False
        self._before_test = Counts({}, {})
        self._begin_time = time.perf_counter()

    # -- hooks ----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes configuration and partition."""
        self._begin(trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes that this round was validated; keeps the metrics of a run that only validates."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._validated = not trainer.sanity_checking
        else:
            self._finish_evaluation(trainer, pl_module, "val/")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the round's row."""
        stale = ("test/",) if self._validated else ("test/", "val/")
        values = {name: value for name, value in _metrics(trainer, pl_module).items() if not name.startswith(stale)}
        self._validated = False
        number = trainer.current_epoch + 1
        self.history = [row for row in self.history if row["round"] < number]
        self.history.append({"round": number, **values})
        self._observe(pl_module)
        self._write_metrics()
        self._write_summary()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Says how the run ended and which round was selected."""
        rounds = trainer.max_epochs
        ended_early = rounds is not None and len(self.history) < rounds
        self.summary["status"] = "stopped early" if ended_early else "completed"
        self._observe(pl_module)
        self._select(trainer)
        self._write_clients(pl_module)
        self._write_summary()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins a run that only tests; after a fit, notes the bytes and seconds that the checkpoint brought along."""
        self._begin(trainer, pl_module)
        self._before_test = counts(pl_module)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the test metrics."""
        self._finish_evaluation(trainer, pl_module, "test/")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins a run that only validates."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._begin(trainer, pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins a run that only predicts."""
        self._begin(trainer, pl_module)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ends a run that only predicts."""
        self.summary["status"] = "completed"
        self._observe(pl_module)
        self._write_summary()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Says what ended the run; what was written stays."""
        if not self.started:
            return
        interrupted = isinstance(exception, (KeyboardInterrupt, SystemExit))
        self.summary["status"] = "interrupted" if interrupted else "failed"
        self.summary["error"] = None if interrupted else f"{type(exception).__name__}: {exception}"
        if isinstance(exception, RunStopped):
            self.summary["status"], self.summary["error"] = exception.status, None
            self.summary["notes"].append(str(exception))
        try:
            if self.summary["command"] == "fit":
                self._observe(pl_module)
                if self.history:
                    self._select(trainer)
                self._write_clients(pl_module)
            self._write_summary()
        except Exception as error:  # such as a full disk: what ended the run must still be told
            rank_zero_warn(f"the end of the run could not be recorded: {type(error).__name__}: {error}")

    def state_dict(self) -> dict[str, Any]:
        """All rounds so far."""
        return {"history": [dict(row) for row in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint's rounds."""
        self.history = [dict(row) for row in state_dict["history"]]

    # -- parts ----------------------------------------------------------------------------------------------------

    def _begin(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.started:
            return
        self.started = True
        self._begin_time = time.perf_counter()
        data = getattr(trainer, "datamodule", None)
        self._record = data.partition_record() if data is not None and hasattr(data, "partition_record") else {}
        summary = self.summary
        summary["method"] = type(getattr(module, "algorithm", module)).__name__
        summary["source"] = self._record.get("source")
        federated = hasattr(module, "byte_counts")
        summary["clients"] = len(self._record.get("clients", [])) or None if federated else None
        summary["seed"] = getattr(module, "resolved_seed", self._record.get("seed"))
        if summary["command"] == "fit":
            monitor = self.monitor or choose_monitor(module, trainer.callbacks)  # type: ignore[attr-defined]
            summary["monitor"], summary["monitor_mode"] = monitor.name, monitor.mode
            summary["uses_labels"] = uses_labels(module, monitor.name)
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._config is not None:
                write_text(self.directory / "config.yaml", self._config)
            if self._record:
                write_json(self.directory / "partition.json", self._record)
        if self.history:
            self._write_metrics()
            finished = trainer.max_epochs is not None and 0 < trainer.max_epochs <= len(self.history)
            if summary["command"] == "fit" and finished:
                summary["notes"].append(
                    f"nothing was left to train: the checkpoint has {len(self.history)} rounds, trainer.max_epochs is "
                    f"{trainer.max_epochs}"
                )
        self._write_summary()

    def _observe(self, module: Any) -> None:
        summary = self.summary
        summary["rounds"] = len(self.history)
        if hasattr(module, "byte_counts"):
            summary["bytes"], summary["seconds"] = module.byte_counts(), dict(module.seconds)
            summary["failures"] = [vars(failure) for failure in module.backend.failures]
        elif summary["command"] == "fit":
            summary["seconds"] = {"fit": time.perf_counter() - self._begin_time}
        summary["notes"] = list(dict.fromkeys([*summary["notes"], *getattr(module, "notes", [])]))

    def _select(self, trainer: pl.Trainer) -> None:
        summary, best = self.summary, best_checkpoint(trainer)
        summary["selected"] = "last" if best is None else "best"
        summary["selected_round"] = len(self.history) if best is None else checkpoint_round(best)
        summary["checkpoint"] = None if best is None or self.directory is None else self._relative(best)
        rows = [row for row in self.history if row["round"] == summary["selected_round"]]
        value = rows[0].get(str(summary["monitor"])) if rows and best is not None else None
        if value is not None and not math.isfinite(value):
            summary["notes"].append(
                f"{summary['monitor']}, which selects the round, was in no round a finite number: the last one is taken"
            )
        if any(getattr(callback, "begins_anew", False) for callback in trainer.checkpoint_callbacks):
            summary["notes"].append(
                f"the run that was resumed selected by another monitor: {summary['monitor']} chose among the new rounds"
            )
        chosen = dict(rows[0]) if rows else {}
        # Whichever round is selected, the privacy of all of them is spent.
        spent = self.history[-1] if self.history else {}
        chosen |= {name: value for name, value in spent.items() if name.startswith("privacy/")}
        summary["metrics"] = {
            name: value for name, value in chosen.items() if name != "round" and not name.startswith(_OWN_ENTRY)
        }

    def _finish_evaluation(self, trainer: pl.Trainer, module: pl.LightningModule, prefix: str) -> None:
        found = {name: value for name, value in _metrics(trainer, module).items() if name.startswith(prefix)}
        self.summary["metrics"].update(found)
        if self.summary["command"] == "fit":
            self.summary["notes"] = list(dict.fromkeys([*self.summary["notes"], *getattr(module, "notes", [])]))
            self._add_test(module)
        else:
            self.summary["status"] = "completed"
            self._observe(module)
        self._write_clients(module)
        self._write_summary()

    def _add_test(self, module: Any) -> None:
        """Adds what the final test cost to the figures of the fit; the tested checkpoint may be an older round's."""
        before, now = self._before_test, counts(module)
        for action, both in now.bytes.items():
            known = self.summary["bytes"].setdefault(action, {"up": 0, "down": 0})
            for direction, count in both.items():
                known[direction] += count - before.bytes.get(action, {}).get(direction, 0)
        for stage, spent in now.seconds.items():
            more = spent - before.seconds.get(stage, 0.0)
            self.summary["seconds"][stage] = self.summary["seconds"].get(stage, 0.0) + more

    def _relative(self, path: Path) -> str:
        if self.directory is not None and path.absolute().is_relative_to(self.directory.absolute()):
            return str(path.absolute().relative_to(self.directory.absolute()))
        return str(path)

    def _write_metrics(self) -> None:
        if self.directory is None:
            return
        names = sorted({name for row in self.history for name in row if name != "round"})
        write_csv(self.directory / "metrics.csv", self.history, ["round", *names])

    def _write_clients(self, module: Any) -> None:
        known = self._record.get("clients", [])
        if self.directory is None or not known:
            return
        rows = [
            {"client": entry["client"], **{split: len(entry[split]) for split in ("train", "val", "test")}}
            for entry in known
        ]
        if hasattr(module, "client_rows"):
            rows = module.client_rows()
        for row in rows:
            row.update({name: known[row["client"]].get(name) for name in ("name", "group")})
        first = ["client", "name", "group", "train", "val", "test"]
        others = sorted({name for row in rows for name in row} - set(first))
        write_csv(self.directory / "clients.csv", rows, [*first, *others])
        for name, table in (module.tables() if hasattr(module, "tables") else {}).items():
            if table:
                write_csv(self.directory / f"{name}.csv", table, list(table[0]))
                picture = self.directory / f"{name}.png"
                if not picture.exists():
                    draw_curve(table, f"{type(module.algorithm).__name__}: {name}", picture)

    def _write_summary(self) -> None:
        if self.directory is not None:
            write_json(self.directory / "summary.json", self.summary)


def _metrics(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, float]:
    """Metrics so far as Python floats: a federated loop keeps its own in double precision."""
    latest = getattr(module, "latest", None)
    source = trainer.callback_metrics if latest is None else latest
    return {str(name): float(value) for name, value in source.items()}
