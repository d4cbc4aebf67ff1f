"""One display for the study: trials done, best so far with the objective's name, what is running."""

from __future__ import annotations

import io

import pytest

from tuning.display import Display
from tuning.engine import work
from tuning.trial import Outcome


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def studied(ledger, runner):
    def make(stream, total=3, **more):
        book = ledger(**more)
        display = Display(book.blueprint, total, stream=stream)
        display.trials(book.trials())

        def watch(task, number):
            if number > 0:
                display.round(task.number, number)
            else:
                display.trials(book.trials())

        def run(values, name, on_round):
            number = int(name.removeprefix("trial_"))
            on_round(1, [1.0 + number])
            if number == 1:
                return Outcome("failed", reason="nan", detail="val/dbi is nan")
            return Outcome("complete", (1.0 + number,), rounds=1)

        work(book, runner(run), total, watch)
        display.close()
        return stream.getvalue()

    return make


def test_lines_where_there_is_no_terminal(studied):
    lines = studied(io.StringIO()).splitlines()
    assert lines == [
        "0/3 trials  best val/dbi none yet, uses no labels",
        "0/3 trials  trial 0: begun",
        "1/3 trials  trial 0: complete  best val/dbi 1 (trial 0), uses no labels",
        "1/3 trials  trial 1: begun",
        "2/3 trials  trial 1: failed (nan)  best val/dbi 1 (trial 0), uses no labels",
        "2/3 trials  trial 2: begun",
        "3/3 trials  trial 2: complete  best val/dbi 1 (trial 0), uses no labels",
    ]


def test_labels_are_marked(studied):
    shown = studied(io.StringIO(), objective="acc", more={"labels": (True,)})
    assert "best val/acc 3 (trial 2), uses labels" in shown
    assert "no labels" not in shown


@pytest.mark.parametrize("labels", [False, True])
def test_one_bar_in_a_terminal(studied, monkeypatch, labels):
    monkeypatch.setenv("COLUMNS", "80")
    shown = studied(Terminal(), more={"labels": (labels,)})
    assert "Trials: 0/3" in shown
    assert "Trials: 3/3" in shown
    assert f"best val/dbi 1 #0 ({'uses labels' if labels else 'no labels'}), #2 round" in shown.replace(" · ", ", ")


def test_nothing_when_it_is_off(ledger):
    book, stream = ledger(), io.StringIO()
    display = Display(book.blueprint, 3, enabled=False, stream=stream)
    display.trials(book.trials())
    display.round(0, 1)
    display.close()
    assert stream.getvalue() == ""
