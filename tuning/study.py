"""`Study`: searches a space of configurations, in this process or in several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from fedclust.checks import choice, positive_int, seed_value
from fedclust.report.rundir import NAME
from tuning.blueprint import Blueprint, make_blueprint
from tuning.display import Display
from tuning.engine import work
from tuning.figures import draw_figures
from tuning.ledger import Ledger, Settings, Task
from tuning.locking import StudyLock
from tuning.objectives import parse_objectives
from tuning.repeat import repeat_best, set_aside
from tuning.samplers import PRUNERS, SAMPLERS
from tuning.space import Space, load_space
from tuning.storage import StorageName
from tuning.summary import count_trials, summarise, write_best, write_study, write_trials
from tuning.trial import Runner
from tuning.workers import Crew, Order, thread_share


class NoBestTrialError(ValueError):
    """No trial is complete, so none is the best."""


@dataclass
class StudyResult:
    """What a study gave.

    Attributes:
        directory: Where its files lie.
        summary: What study.json holds.
        trials: All trials, as Optuna has them.
        repeats: What repeats.json holds, or None without repetition.
    """

    directory: Path
    summary: dict[str, Any]
    trials: list[FrozenTrial] = field(repr=False)
    repeats: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def best(self) -> dict[str, Any]:
        """The best trial: "trial", "values", "params", "metrics", "uses_labels", "directory".

        Raises:
            NoBestTrialError: If no trial is complete; says how many failed and why.
        """
        found: dict[str, Any] | None = self.summary["best"]
        if found is None:
            raise NoBestTrialError(no_best(self.summary))
        return found

    @property
    def best_config(self) -> Path:
        """best.yaml, which `fedclust fit --config` runs as it is.

        Raises:
            NoBestTrialError: If no trial is complete.
        """
        _ = self.best
        return self.directory / "best.yaml"


class Study:
    """A search over a configuration's values.

    Nothing is run before `run`. The same study run again goes on to the total that is asked for.

    Args:
        config: Configuration that trials start from, a path or the name of a shipped one.
        space: What is searched: a path, the name of a shipped space, or a mapping of the same shape.
        objective: Names, comma separated or a list; see `tuning.objectives.parse_objectives`.
        name: The study's name; None takes "tune_" and the configuration's name.
        storage: "journal:PATH" or a database URL; None is a journal in the study's directory.
        sampler: "tpe", "random", "qmc" or "nsgaii".
        pruner: "median", "hyperband", "successive_halving" or "none".
        startup: Complete trials before the median pruner begins.
        seed: Seed of the sampler; None takes the runs' seed.
        jobs: Trials at once, each in a process of its own if there are several.
        requeue: Whether parameters of killed trials are tried again.
        rerun_duplicates: Whether parameters that were completed before are run again instead of reused.
        repeats: Seeds under which the best configuration is repeated at the end; 0 for none.
        figures: Whether to draw figures at the end.
        overrides: Further arguments of `fedclust fit` for every trial, such as "--trainer.max_epochs=5".
        progress: Whether to show progress.

    Raises:
        ValueError: For arguments out of range, or a space or objective that cannot be read.
    """

    def __init__(
        self,
        config: str | Path | None,
        space: str | Path | dict[str, Any] | Space,
        objective: str | Sequence[str] = "dbi",
        *,
        name: str | None = None,
        storage: str | None = None,
        sampler: str = "tpe",
        pruner: str = "median",
        startup: int = 5,
        seed: int | None = None,
        jobs: int = 1,
        requeue: bool = False,
        rerun_duplicates: bool = False,
        repeats: int = 5,
        figures: bool = True,
        overrides: Sequence[str] = (),
        progress: bool = True,
    ) -> None:
        self.arguments = [*([] if config is None else ["--config", str(config)]), *overrides]
        self.space = space if isinstance(space, Space) else load_space(space)
        self.objectives = parse_objectives(objective)
        self.name, self.storage, self.progress, self.figures = name, storage, progress, figures
        if name is not None and not NAME.fullmatch(name):
            raise ValueError(f"the study's name must be made of letters, digits, '.', '_' and '-', not {name!r}")
        choice("sampler", sampler, SAMPLERS)
        choice("pruner", pruner, PRUNERS)
        self.seed = None if seed is None else seed_value("seed", seed)
        self.repeats = positive_int("repeats", repeats, least=0)
        positive_int("jobs", jobs)
        if jobs > 1 and not StudyLock.between_processes():
            raise ValueError(f"jobs={jobs} needs file locks between processes, which this system lacks; use jobs=1")
        self.settings = Settings(
            sampler, pruner, positive_int("startup", startup, least=0), jobs, rerun_duplicates, requeue
        )  # fmt: skip

    def run(self, trials: int = 20) -> StudyResult:
        """Runs trials until so many are finished; then draws, repeats the best and writes the study's files.

        Args:
            trials: Finished trials that there shall be, complete, pruned and failed ones together.

        Raises:
            ValueError: If the study cannot start, or was begun with other settings.
            tuning.objectives.NoSuchMetricError: If the objective is not logged.
            tuning.workers.WorkerError: If workers could not go on.
            KeyboardInterrupt: On Ctrl-C, after the study's files were written; the same call goes on.
        """
        session = self.prepare(trials)
        session.search()
        return session.finish()

    def prepare(self, trials: int) -> Session:
        """Checks everything and opens the storage; runs nothing yet."""
        positive_int("trials", trials)
        blueprint = make_blueprint(self.arguments, self.space, self.objectives, self.seed)
        name = self.name or f"tune_{blueprint.name}"
        directory = Path(blueprint.runs_root).expanduser() / name
        storage = StorageName.of(self.storage, directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"runs_root: cannot make the study's directory {directory}: {error.strerror}") from error
        try:
            ledger = Ledger(name, storage, directory, blueprint, self.settings)
        except BaseException:
            _remove_if_empty(directory)
            raise
        blueprint.claim(directory)
        blueprint.write(directory)
        return Session(self, ledger, blueprint, directory, trials)


class Session:
    """One run of a study's command, from the first trial to the last file."""

    def __init__(self, study: Study, ledger: Ledger, blueprint: Blueprint, directory: Path, total: int) -> None:
        self.study, self.ledger, self.blueprint = study, ledger, blueprint
        self.directory, self.total = directory, total
        self.status = "interrupted"
        self._begin = time.perf_counter()
        self._runner: Runner | None = None

    def search(self) -> None:
        """Runs trials until there are enough; whatever ends it, the study's files are written."""
        self.ledger.reclaim()
        display = Display(self.blueprint, self.total, self.study.progress)
        display.trials(self.ledger.trials())
        try:
            if self.study.settings.jobs == 1:
                work(self.ledger, self._runs(), self.total, self._watch(display))
            else:
                self._crew(display).run()
            display.trials(self.ledger.trials())
            self.status = "completed"
        except Exception:
            self.status = "failed"
            raise
        finally:
            display.close()
            self._write()

    def finish(self, say: Callable[[str], None] = lambda text: None) -> StudyResult:
        """Draws the figures, repeats the best configuration, and gives the result.

        Args:
            say: Told what is being done.
        """
        summary = self._write()
        best, repeats = self.ledger.best(), None
        if self.study.figures and best is not None:
            summary["figures"], notes = draw_figures(self.ledger.study, self.blueprint, self.directory / "figures")
            summary["notes"] = [*summary["notes"], *notes]
        if best is not None:
            set_aside(self.directory, self.blueprint, best.params)
        if best is not None and self.study.repeats:
            repeats = repeat_best(self._runs(), best.params, range(self.study.repeats), say)
            summary["repeats"] = repeats["table"]
        write_study(self.directory, summary)
        return StudyResult(self.directory, summary, self.ledger.trials(), repeats)

    def _write(self) -> dict[str, Any]:
        """Writes study.json, trials.csv and best.yaml."""
        trials, best = self.ledger.trials(), self.ledger.best()
        status = self.status
        if status == "completed" and count_trials(trials)["counted"] < self.total:
            status = "others are still running"
        summary = summarise(self.ledger, self.total, time.perf_counter() - self._begin, status)
        write_trials(self.directory, trials, self.blueprint)
        if best is not None:
            write_best(self.directory, self.ledger, best)
        write_study(self.directory, summary)
        return summary

    def _watch(self, display: Display) -> Callable[[Task, int], None]:
        def watch(task: Task, number: int) -> None:
            if number > 0:
                display.round(task.number, number)
            else:
                display.trials(self.ledger.trials())

        return watch

    def _crew(self, display: Display) -> Crew:
        settings = self.study.settings
        order = Order(
            self.ledger.name, self.ledger.storage, self.directory, self.blueprint, settings, self.total,
            thread_share(settings.jobs),
        )  # fmt: skip
        return Crew(order, self.ledger, lambda: display.trials(self.ledger.trials()))

    def _runs(self) -> Runner:
        if self._runner is None:
            self._runner = Runner(self.blueprint, self.directory)
        return self._runner


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def no_best(summary: dict[str, Any]) -> str:
    """Why there is no best trial, in a sentence."""
    counted = summary["counts"]
    why = ", ".join(f"{count} {reason}" for reason, count in counted["failed_by_reason"].items())
    return (
        f"no trial of the study {summary['name']!r} is complete, so there is no best one: {counted['failed']} failed"
        + (f" ({why})" if why else "")
        + f", {counted['pruned']} were pruned, {counted['killed'] + counted['interrupted']} were killed or interrupted"
    )
