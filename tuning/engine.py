"""The loop that asks for a trial, runs it and tells how it ended; in this process or in a worker."""

from __future__ import annotations

from collections.abc import Callable

from tuning.ledger import Ledger, Task
from tuning.trial import FAILED, Interrupted, Outcome, Runner

Watch = Callable[[Task, int], None]


def work(ledger: Ledger, runner: Runner, total: int, watch: Watch) -> None:
    """Runs trials until there are enough.

    Args:
        ledger: The study's book.
        runner: Runs configurations.
        total: How many trials there shall be.
        watch: Told of every trial when it begins (round 0), after each round, and with -1 when it is over.

    Raises:
        Interrupted: On Ctrl-C; the running trial is marked failed before.
    """
    while (task := ledger.ask(total)) is not None:
        try:
            if task.reused is None:
                _run(ledger, runner, task, watch)
        finally:
            ledger.let_go(task.number)
        watch(task, -1)


def _run(ledger: Ledger, runner: Runner, task: Task, watch: Watch) -> None:
    def on_round(number: int, values: list[float | None]) -> bool:
        hopeless = ledger.report(task, number, values)
        watch(task, number)
        return hopeless

    before = runner.shared.counts()
    try:
        watch(task, 0)
        outcome = runner.trial(task.values, f"trial_{task.number}", on_round)
    except Interrupted as stop:
        ledger.tell(task, stop.outcome)
        raise
    except BaseException as error:
        interrupted = isinstance(error, (KeyboardInterrupt, SystemExit))
        reason = "interrupted" if interrupted else "error"
        ledger.tell(task, Outcome(FAILED, reason=reason, detail=f"{type(error).__name__}: {error}"))
        raise
    after = runner.shared.counts()
    ledger.tell(task, outcome, {name: after[name] - before[name] for name in after})
