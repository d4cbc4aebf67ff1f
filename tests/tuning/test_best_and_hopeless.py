"""Which trial is the best, and which are stopped early (story I7)."""

from __future__ import annotations

import math

import pytest
from optuna.trial import TrialState

from tuning.engine import work
from tuning.ledger import round_of
from tuning.summary import count_trials
from tuning.trial import Outcome


def nothing(task, number):
    pass


def test_a_bad_trial_is_stopped_after_its_first_round(ledger, runner):
    def run(values, name, on_round):
        bad = 100.0 if name == "trial_3" else 0.0
        for number in (1, 2, 3):
            if on_round(number, [bad + 1 / number]):
                return Outcome("pruned", rounds=number)
        return Outcome("complete", (bad,), rounds=3)

    book = ledger(startup=2)
    work(book, runner(run), 5, nothing)
    assert [trial.state for trial in book.trials()] == [
        TrialState.PRUNED if number == 3 else TrialState.COMPLETE for number in range(5)
    ]
    pruned = book.trials()[3]
    assert (pruned.intermediate_values, round_of(pruned)) == ({1: 101.0}, 1)
    assert count_trials(book.trials())["pruned"] == 1


def test_a_round_without_a_finite_value_is_as_bad_as_can_be(ledger, runner):
    def run(values, name, on_round):
        value = math.nan if name == "trial_2" else 1.0
        return Outcome("pruned", rounds=1) if on_round(1, [value]) else Outcome("complete", (1.0,), rounds=1)

    book = ledger(startup=2)
    work(book, runner(run), 3, nothing)
    assert book.trials()[2].state == TrialState.PRUNED


def test_several_objectives_have_a_front_and_no_pruning(ledger, runner):
    def run(values, name, on_round):
        pair = (values["x"], -values["x"])
        assert not on_round(1, [pair[0], math.nan])
        return Outcome("complete", pair, rounds=1)

    book = ledger(objective="dbi,val/recon", pruner="median", startup=0)
    work(book, runner(run), 4, nothing)
    assert [trial.number for trial in book.front()] == [0, 1, 2, 3]
    assert book.best().values[0] == min(trial.values[0] for trial in book.trials())
    assert [round_of(trial) for trial in book.trials()] == [1] * 4


@pytest.mark.parametrize(
    ("pairs", "best"),
    [([(0.9, 0.5), (0.9, 0.8), (0.7, 0.9)], 1), ([(0.7, 0.9), (0.9, 0.8), (0.9, 0.8), (0.9, 0.7)], 1)],
)
def test_the_best_of_equals_in_the_first_objective_is_on_the_front(ledger, runner, pairs, best):
    book = ledger(objective="acc,nmi")
    work(book, runner(lambda values, name, on_round: Outcome("complete", pairs[int(name[-1])])), len(pairs), nothing)
    assert book.best().number == best
    assert best in [trial.number for trial in book.front()]


def test_the_earlier_one_of_equals_is_the_best(ledger, runner):
    book = ledger(objective="acc")
    work(book, runner(lambda values, name, on_round: Outcome("complete", (0.5,))), 3, nothing)
    assert book.best().number == 0
