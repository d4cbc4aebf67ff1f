"""The study's book: which trials there are, who runs them, how many count, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from fedclust.report.files import plain
from tuning.blueprint import Blueprint, differences, digest
from tuning.parameters import Value
from tuning.processes import alive, this_process
from tuning.pruning import for_pruner
from tuning.samplers import make_pruner, make_sampler
from tuning.storage import StorageName, explained
from tuning.trial import COMPLETE, PRUNED, Outcome

_STUDY, _WORKER, _PLACE, _RUN, _REUSED, _REQUEUED = "fedclust", "worker", "place", "run", "reused", "requeued"
STOPPED = ("killed", "interrupted")  # reasons of trials that were ended from outside, and do not count
_STATES = {COMPLETE: TrialState.COMPLETE, PRUNED: TrialState.PRUNED}

# Storage, study and number of the trials that run in this process.
_held_here: set[tuple[str, str, int]] = set()


@dataclass(frozen=True)
class Settings:
    """How trials are drawn and stopped; goes to worker processes.

    Attributes:
        sampler: Name of the sampler.
        pruner: Name of the pruner.
        startup: Complete trials before the median pruner begins.
        jobs: Trials at once.
        rerun_duplicates: Whether parameters that were completed before are run again.
        requeue: Whether the parameters of killed trials are tried again.
    """

    sampler: str = "tpe"
    pruner: str = "median"
    startup: int = 5
    jobs: int = 1
    rerun_duplicates: bool = False
    requeue: bool = False


@dataclass(frozen=True)
class Task:
    """A trial to run; `reused` is the number of the trial whose values it took instead, if any."""

    trial: Trial
    values: dict[str, Value]
    reused: int | None = None

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.trial.number


class Ledger:
    """All that is read from and written to the storage; several processes may have one each.

    Args:
        name: The study's name.
        storage: Where trials are kept.
        directory: The study's directory.
        blueprint: What all trials start from.
        settings: How trials are drawn and stopped.
    """

    def __init__(
        self, name: str, storage: StorageName, directory: Path, blueprint: Blueprint, settings: Settings
    ) -> None:
        self.name, self.storage, self.directory = name, storage, directory
        self.blueprint, self.settings = blueprint, settings
        self.lock = storage.lock(directory)
        self.study: optuna.Study = self._open()

    # -- reading --------------------------------------------------------------------------------------------------

    def trials(self) -> list[FrozenTrial]:
        """All trials, by number."""
        with explained(self.storage):
            return self.study.get_trials(deepcopy=False)

    def best(self) -> FrozenTrial | None:
        """The best complete trial; with several objectives that on the front with the best first one."""
        return best_of(self.trials(), self.blueprint)

    def front(self) -> list[FrozenTrial]:
        """The complete trials that no other is better than in every objective."""
        if not any(trial.state == TrialState.COMPLETE for trial in self.trials()):
            return []
        return sorted(self.study.best_trials, key=lambda trial: trial.number)

    # -- writing --------------------------------------------------------------------------------------------------

    def reclaim(self) -> list[int]:
        """Marks trials whose process is gone as failed, and queues their parameters again where that is asked for."""
        with self.lock(), explained(self.storage):
            local = self.storage.file is not None
            running = [trial for trial in self.trials() if trial.state == TrialState.RUNNING]
            dead = [trial.number for trial in running if _is_dead(trial, local) or self._is_left(trial)]
            for number in dead:
                self.study.tell(number, state=TrialState.FAIL)
            if self.settings.requeue:
                self._requeue()
            return dead

    def ask(self, total: int) -> Task | None:
        """The next trial, or None if enough are finished or running.

        Args:
            total: How many trials there shall be, without killed and interrupted ones.
        """
        with self.lock(), explained(self.storage):
            trials = self.trials()
            places = {trial.user_attrs.get(_PLACE) for trial in trials if counts(trial)}
            if sum(map(counts, trials)) >= total:
                return None
            place = next(number for number in range(len(trials) + 1) if number not in places)
            settings = self.settings
            self.study.sampler = make_sampler(settings.sampler, self.blueprint.seed, place, settings.jobs)
            trial = self.study.ask()
            _held_here.add(self._key(trial.number))
            try:
                trial.set_user_attr(_WORKER, this_process())
                trial.set_user_attr(_PLACE, place)
                values = self.blueprint.space.suggest(trial)
                before = None if settings.rerun_duplicates else _completed(trials, values)
                if before is None:
                    return Task(trial, values)
                trial.set_user_attr(_REUSED, before.number)
                trial.set_user_attr(_RUN, before.user_attrs[_RUN])
                self.study.tell(trial, list(before.values))
                self.let_go(trial.number)
                return Task(trial, values, before.number)
            except BaseException:
                self.let_go(trial.number)
                self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
                raise

    def report(self, task: Task, number: int, values: Sequence[float | None]) -> bool:
        """Notes a round's values; says whether the trial is hopeless. Several objectives are never pruned."""
        with explained(self.storage):
            if len(values) > 1:
                task.trial.set_user_attr("round", number)
                return False
            value = for_pruner(self.blueprint.objectives[0], values[0])
            if value is None:
                return False
            task.trial.report(value, number)
            return bool(task.trial.should_prune())

    def tell(self, task: Task, outcome: Outcome, saved: Mapping[str, int] | None = None) -> None:
        """Ends a trial.

        Args:
            task: The trial.
            outcome: How its run ended.
            saved: What did not have to be computed, see `tuning.reuse.Shared.counts`.
        """
        run = {**vars(outcome), "saved": dict(saved or {})}
        with explained(self.storage):
            task.trial.set_user_attr(_RUN, plain(run))
            state = _STATES.get(outcome.state, TrialState.FAIL)
            values = list(outcome.values) if state == TrialState.COMPLETE else None
            self.study.tell(task.trial, values, state=state)

    def let_go(self, number: int) -> None:
        """Says that this process does not run a trial any more; if it still counts as running, `reclaim` takes it."""
        _held_here.discard(self._key(number))

    # -- parts ----------------------------------------------------------------------------------------------------

    def _open(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        described = self.blueprint.described()
        epochs = self.blueprint.config.get("trainer", {}).get("max_epochs")
        pruner = make_pruner(self.settings.pruner, self.settings.startup, epochs if epochs and epochs > 0 else None)
        with self.lock(), explained(self.storage):
            study = optuna.create_study(
                study_name=self.name,
                storage=self.storage.open(),
                directions=[objective.direction for objective in self.blueprint.objectives],
                pruner=pruner,
                load_if_exists=True,
            )
            known = study.user_attrs.get(_STUDY)
            if known is None and study.get_trials(deepcopy=False):
                raise ValueError(f"the study {self.name!r} in {self.storage.shown} was not made by fedclust tune")
            if known is None:
                study.set_user_attr(_STUDY, {"digest": digest(described), "described": described})
        if known is not None and known["digest"] != digest(described):
            changes = "; ".join(differences(known["described"], plain(described))[:6])
            raise ValueError(
                f"the study {self.name!r} in {self.storage.shown} was begun with other settings: {changes}. Give "
                "another --study-name, or the settings that it was begun with"
            )
        return study

    def _key(self, number: int) -> tuple[str, str, int]:
        return self.storage.url, self.name, number

    def _is_left(self, trial: FrozenTrial) -> bool:
        """Whether this process began a trial, could not say how it ended, and does not run it any more."""
        return worker_of(trial) == this_process() and self._key(trial.number) not in _held_here

    def _requeue(self) -> None:
        trials = self.trials()
        taken = {trial.user_attrs.get(_PLACE) for trial in trials if counts(trial)}
        again = {trial.user_attrs.get(_REQUEUED) for trial in trials}
        for trial in trials:
            lost = reason_of(trial) in STOPPED and trial.user_attrs.get(_PLACE) not in taken
            if lost and trial.params and trial.number not in again:
                self.study.enqueue_trial(trial.params, user_attrs={_REQUEUED: trial.number})


def reason_of(trial: FrozenTrial) -> str | None:
    """Why a trial failed, in a word; None if it did not fail."""
    if trial.state != TrialState.FAIL:
        return None
    # A process that was killed could not say anything.
    return run_of(trial).get("reason") or "killed"


def run_of(trial: FrozenTrial) -> dict[str, Any]:
    """What a trial's run left: directory, metrics, reason, detail, seconds."""
    return dict(trial.user_attrs.get(_RUN, {}))


def reused_from(trial: FrozenTrial) -> int | None:
    """The trial whose values this one took without a run, if it did."""
    number = trial.user_attrs.get(_REUSED)
    return None if number is None else int(number)


def worker_of(trial: FrozenTrial) -> dict[str, Any]:
    """The process that runs or ran a trial."""
    return dict(trial.user_attrs.get(_WORKER, {}))


def round_of(trial: FrozenTrial) -> int:
    """The last round that a trial reported."""
    return int(trial.user_attrs.get("round", trial.last_step or 0))


def counts(trial: FrozenTrial) -> bool:
    """Whether a trial counts towards the total: finished by itself, or running."""
    if trial.state == TrialState.FAIL:
        return reason_of(trial) not in STOPPED
    return trial.state != TrialState.WAITING


def best_of(trials: Sequence[FrozenTrial], blueprint: Blueprint) -> FrozenTrial | None:
    """The complete trial with the best first objective.

    Equal in that, the other objectives decide, so that it is on the Pareto front; equal in all, the earlier one.
    """
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    signs = [1 if objective.mode == "min" else -1 for objective in blueprint.objectives]
    return min(
        complete,
        key=lambda trial: tuple(sign * value for sign, value in zip(signs, trial.values, strict=True)),
        default=None,
    )


def _is_dead(trial: FrozenTrial, local: bool) -> bool:
    worker = worker_of(trial)
    # A trial without a process is of one that died between two writes: while the lock is held, nobody else is between
    # them, unless other hosts use the storage too.
    return alive(worker) is False if worker else local


def _completed(trials: Sequence[FrozenTrial], values: Mapping[str, Value]) -> FrozenTrial | None:
    for trial in trials:
        if trial.state == TrialState.COMPLETE and reused_from(trial) is None and trial.params == values:
            return trial
    return None
