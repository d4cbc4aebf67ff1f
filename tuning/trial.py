"""One run of a study, in this process and through the same configuration path as `fedclust fit`."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedclust.federation.backend import Backend
from fedclust.launch.arguments import prepare
from fedclust.launch.errors import explain
from fedclust.launch.parser import FedclustCLI
from fedclust.launch.process import borrowed_process
from fedclust.report.predictions import weights_only
from tuning.blueprint import Blueprint
from tuning.objectives import NoSuchMetricError, value_of
from tuning.parameters import Value
from tuning.pruning import OnRound, Pruned, RoundReporter
from tuning.reuse import Shared

COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        state: "complete", "pruned" or "failed".
        values: One per objective, where it is complete.
        reason: Why it failed, in a word: "nan", "infinite", "collapsed", "missing metric", "error", "interrupted".
        detail: The same in a sentence.
        directory: The run's directory, if it began.
        metrics: Metrics of the selected round, and `test/…` where it was tested.
        rounds: Rounds done.
        seconds: How long it took.
    """

    state: str
    values: tuple[float, ...] = ()
    reason: str | None = None
    detail: str | None = None
    directory: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; what it left is in `outcome`."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__("interrupted")
        self.outcome = outcome


class Runner:
    """Runs configurations of a blueprint one after the other; what they share is kept between them.

    Args:
        blueprint: What all runs start from.
        directory: The study's directory; runs get directories inside.
    """

    def __init__(self, blueprint: Blueprint, directory: Path) -> None:
        self.blueprint = blueprint
        self.directory = directory
        self.base = blueprint.write(directory)
        self.shared = Shared(directory)

    def trial(self, values: Mapping[str, Value], name: str, on_round: OnRound) -> Outcome:
        """Fits a configuration with these values and judges it; the test split is not touched.

        Raises:
            Interrupted: On Ctrl-C.
            NoSuchMetricError: If an objective is logged by no run.
        """
        reporter = RoundReporter(self.blueprint.objectives, self.blueprint.terms, on_round)
        outcome = self._run(self.blueprint.space.overrides(values), name, reporter)
        return self._judged(outcome) if outcome.state == COMPLETE else outcome

    def repeat(self, values: Mapping[str, Value], name: str, seed: int) -> Outcome:
        """Fits a configuration under another seed and tests its selected round."""
        return self._run(self.blueprint.under_seed(values, seed), name, None)

    def _run(self, overrides: Sequence[str], name: str, reporter: RoundReporter | None) -> Outcome:
        start = time.perf_counter()
        arguments = [
            "--config", str(self.base), *overrides, f"--runs_root={self.directory}", f"--name={name}",
            "--trainer.enable_progress_bar=false",
        ]  # fmt: skip
        run = _Run()
        with borrowed_process(), _quiet_notes(), self.shared():
            try:
                run.fit(arguments, name, reporter, self.shared)
                outcome = run.outcome(COMPLETE)
            except Pruned as stopped:
                outcome = run.outcome(PRUNED, detail=str(stopped))
            except NoSuchMetricError:
                run.forget_checkpoints()
                raise
            except (KeyboardInterrupt, SystemExit) as stop:
                run.forget_checkpoints()
                detail = "interrupted by the user"
                raise Interrupted(run.outcome(FAILED, reason="interrupted", detail=detail)) from stop
            except Exception as error:
                outcome = run.outcome(FAILED, reason="error", detail=f"{type(error).__name__}: {explain(error)}")
            finally:
                run.close()
        run.forget_checkpoints(keep_best=outcome.state == COMPLETE)
        return Outcome(**{**vars(outcome), "seconds": time.perf_counter() - start})

    def _judged(self, outcome: Outcome) -> Outcome:
        """Complete with finite values, or failed with a reason."""
        metrics, values = outcome.metrics, []
        if any(name.endswith("/collapsed") and value for name, value in metrics.items()):
            return _failed(outcome, "collapsed", "the clustering of the selected round is degenerate")
        for objective in self.blueprint.objectives:
            value = value_of(objective, metrics, self.blueprint.terms)
            if value is None:
                return _failed(outcome, "missing metric", f"{objective.name} was not logged in the selected round")
            if not math.isfinite(value):
                reason = "nan" if math.isnan(value) else "infinite"
                return _failed(outcome, reason, f"{objective.name} is {value} in the selected round")
            values.append(value)
        return Outcome(**{**vars(outcome), "values": tuple(values)})


class _Run:
    """One command line from its parts to what it left."""

    def __init__(self) -> None:
        self.cli: FedclustCLI | None = None
        self.data: Any = None

    def fit(self, arguments: list[str], name: str, reporter: RoundReporter | None, shared: Shared) -> None:
        """Fits; tests the selected round too where nobody watches the rounds."""
        prepared = prepare("fit", arguments)
        cli = self.cli = FedclustCLI("fit", prepared.arguments, name, [] if reporter is None else [reporter])
        data = self.data = shared.data_for(cli.config, cli.datamodule)
        cli.trainer.fit(cli.model, datamodule=data, **weights_only(cli.trainer.fit))
        if reporter is None:
            cli.test_selected(data)

    def close(self) -> None:
        """Ends what the run has beside this process: a backend keeps its workers for a test that no trial has."""
        backend = None if self.cli is None else getattr(self.cli.model, "backend", None)
        if isinstance(backend, Backend):
            backend.close()
        if self.data is not None:
            self.data.trainer = None  # rows that are kept for the next run would keep this run's model with them

    def outcome(self, state: str, reason: str | None = None, detail: str | None = None) -> Outcome:
        """What the run recorded."""
        cli = self.cli
        if cli is None or cli.recorder is None or cli.run_directory is None:
            return Outcome(state, reason=reason, detail=detail)
        directory = None if cli.run_directory.remove_if_empty() else str(cli.run_directory.path)
        summary = cli.recorder.summary
        metrics = {name: float(value) for name, value in summary["metrics"].items()}
        return Outcome(state, (), reason, detail, directory, metrics, int(summary["rounds"]))

    def forget_checkpoints(self, keep_best: bool = False) -> None:
        """Removes checkpoints: all, or all but the selected round's."""
        if self.cli is None or self.cli.run_directory is None:
            return
        folder = self.cli.run_directory.checkpoints
        if not keep_best:
            shutil.rmtree(folder, ignore_errors=True)
            return
        for name in ("start.ckpt", "last.ckpt"):
            if (folder / "best.ckpt").is_file():
                (folder / name).unlink(missing_ok=True)


def _failed(outcome: Outcome, reason: str, detail: str) -> Outcome:
    return Outcome(**{**vars(outcome), "state": FAILED, "reason": reason, "detail": detail, "values": ()})


@contextmanager
def _quiet_notes() -> Iterator[None]:
    """Keeps the notes of single runs off the terminal; each is in its run's summary."""
    logger = logging.getLogger("fedclust")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
