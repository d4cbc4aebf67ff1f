"""The one progress display of a study: trials done, best value so far, what is running."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from tuning.blueprint import Blueprint
from tuning.ledger import best_of, counts, reason_of, reused_from, round_of
from tuning.objectives import label_note


class Display:
    """A bar in a terminal, elsewhere a line where a trial begins and one where it ends.

    Args:
        blueprint: Names the objective.
        total: Trials that there shall be.
        enabled: Whether anything is shown.
        stream: Where to write; None is stderr.
    """

    def __init__(
        self, blueprint: Blueprint, total: int, enabled: bool = True, stream: TextIO | None = None
    ) -> None:  # fmt: skip
        self.blueprint, self.total, self.enabled = blueprint, total, enabled
        self._stream = stream
        self._bar: tqdm[Any] | None = None
        self._shown: set[int] | None = None
        self._begun: set[int] = set()
        self._best = ""
        self._running: dict[int, int] = {}
        self._last = 0.0

    def trials(self, trials: Sequence[FrozenTrial]) -> None:
        """Shows where the study is."""
        if not self.enabled:
            return
        done = [trial for trial in trials if trial.state.is_finished()]
        self._best = self._best_text(trials, short=self._terminal())
        self._running = {trial.number: round_of(trial) for trial in trials if trial.state == TrialState.RUNNING}
        finished = sum(counts(trial) for trial in done)
        if self._terminal():
            bar = self._open(finished)
            bar.update(finished - bar.n)
            self._postfix()
            return
        if self._shown is None:
            self._shown = {trial.number for trial in done}
            self._write(f"{finished}/{self.total} trials  {self._best}")
        for trial in done:
            if trial.number not in self._shown:
                self._shown.add(trial.number)
                self._write(f"{finished}/{self.total} trials  trial {trial.number}: {_ended(trial)}  {self._best}")
        for number in sorted(self._running.keys() - self._begun):
            self._begun.add(number)
            self._write(f"{finished}/{self.total} trials  trial {number}: begun")

    def round(self, number: int, done: int) -> None:
        """Shows that a running trial has done a round."""
        self._running = {number: done}
        if self.enabled and self._bar is not None and time.monotonic() - self._last > 0.1:
            self._postfix()

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _best_text(self, trials: Sequence[FrozenTrial], short: bool) -> str:
        best, labels = best_of(trials, self.blueprint), self.blueprint.uses_labels
        name = self.blueprint.objectives[0].name
        if short:  # a line of 80 columns has room for no more
            value = "none" if best is None else f"{best.values[0]:.4g} #{best.number}"
            return f"best {name} {value} ({'uses labels' if labels else 'no labels'})"
        value = "none yet" if best is None else f"{best.values[0]:.5g} (trial {best.number})"
        return f"best {name} {value}, {label_note(labels)}"

    def _postfix(self) -> None:
        self._last = time.monotonic()
        running = ", ".join(f"#{number} round {done}" for number, done in sorted(self._running.items()))
        if self._bar is not None:
            self._bar.set_postfix_str(" · ".join(part for part in (self._best, running) if part))

    def _open(self, done: int) -> tqdm[Any]:
        if self._bar is None:
            size = shutil.get_terminal_size()
            self._bar = tqdm(
                total=self.total, initial=done, desc="Trials", unit="trial", file=self._out(), ncols=size.columns,
                nrows=size.lines, bar_format="{desc}: {n_fmt}/{total_fmt} [{bar:8}] {elapsed}{postfix}",
            )  # fmt: skip
        return self._bar

    def _write(self, text: str) -> None:
        self._out().write(text.rstrip() + "\n")
        self._out().flush()

    def _out(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _terminal(self) -> bool:
        return self._out().isatty()


def _ended(trial: FrozenTrial) -> str:
    if trial.state == TrialState.COMPLETE:
        again = reused_from(trial)
        return "complete" if again is None else f"as trial {again}"
    if trial.state == TrialState.PRUNED:
        return f"pruned after round {round_of(trial)}"
    return f"failed ({reason_of(trial)})"
