"""The study's book (stories I1, I2, I4, I6, I7): every trial counted once, none lost, hopeless ones stopped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
from optuna.trial import TrialState

from tuning.engine import work
from tuning.ledger import best_of, counts, reason_of, reused_from
from tuning.processes import alive, this_process
from tuning.storage import StorageError
from tuning.summary import count_trials
from tuning.trial import Interrupted, Outcome


def nothing(task, number):
    pass


def drawn(ledger):
    """Parameters, state and values of the trials that count, in order."""
    return [(trial.params, trial.state, trial.values) for trial in ledger.trials() if counts(trial)]


# -- I1: NaN, infinities, exceptions ------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["nan", "infinite", "collapsed", "error"])
def test_failed_trials_are_counted_with_their_reason_and_never_the_best(ledger, runner, reason):
    book = ledger()
    fails = lambda values, name, on_round: Outcome("failed", reason=reason, detail=f"{name} went wrong")  # noqa: E731
    work(book, runner(fails), 5, nothing)
    trials = book.trials()
    assert [trial.state for trial in trials] == [TrialState.FAIL] * 5
    assert {reason_of(trial) for trial in trials} == {reason}
    counted = count_trials(trials)
    assert (counted["counted"], counted["failed"], counted["failed_by_reason"]) == (5, 5, {reason: 5})
    assert best_of(trials, book.blueprint) is None
    assert book.ask(5) is None


def test_a_failed_trial_beside_complete_ones(ledger, runner):
    book = ledger()

    def run(values, name, on_round):
        if name in ("trial_0", "trial_3"):
            return Outcome("failed", reason="infinite", detail="val/dbi is -inf")
        return Outcome("complete", (float(name[-1]),))

    work(book, runner(run), 5, nothing)
    assert book.best().number == 1
    assert count_trials(book.trials())["failed_by_reason"] == {"infinite": 2}


# -- I2: several processes on one database ------------------------------------------------------------------------


def _work_from_zero(make, storage, runner):
    book = make(storage=storage, jobs=4)
    work(book, runner(), 20, nothing)
    os._exit(0)


@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_processes_that_begin_one_study_at_once_lose_no_trial_and_make_none_too_many(ledger, runner, tmp_path, kind):
    file = tmp_path / "study.db"
    storage = f"sqlite:///{file}" if kind == "sqlite" else f"journal:{file}"
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_work_from_zero, args=(ledger, storage, runner)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert [worker.exitcode for worker in workers] == [0] * 4
    trials = ledger(storage=storage).trials()
    assert [trial.number for trial in trials] == list(range(20))
    assert all(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)


# -- I4: killed runs ----------------------------------------------------------------------------------------------


def _hang_in_third(make, runner, settings):
    def run(values, name, on_round):
        if name == "trial_2":
            on_round(1, [5.0])
            time.sleep(600)
        return Outcome("complete", (values["x"],))

    work(make(**settings), runner(run), 5, nothing)


@pytest.mark.parametrize("requeue", [False, True])
def test_a_killed_trial_is_marked_failed_and_does_not_count(ledger, runner, requeue):
    victim = multiprocessing.get_context("fork").Process(target=_hang_in_third, args=(ledger, runner, {}))
    victim.start()
    book = ledger(requeue=requeue)
    deadline = time.monotonic() + 120
    while not any(trial.number == 2 and trial.intermediate_values for trial in book.trials()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert book.reclaim() == []  # a living one is left alone
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()

    assert book.reclaim() == [2]
    killed = book.trials()[2]
    assert (killed.state, reason_of(killed)) == (TrialState.FAIL, "killed")
    assert count_trials(book.trials())["counted"] == 2
    run = runner(lambda values, name, on_round: Outcome("complete", (values["x"],)))
    work(book, run, 5, nothing)
    counted = count_trials(book.trials())
    assert (counted["complete"], counted["killed"], counted["waiting"]) == (5, 1, 0)
    assert len(run.ran) == 3
    # With one job the same values come again, queued or not: they depend on the trial's place among those that count.
    assert run.ran[0][1] == killed.params
    assert book.reclaim() == []
    assert len(book.trials()) == 6


def test_trials_of_other_hosts_are_left_alone_and_count(ledger):
    book = ledger()
    task = book.ask(3)
    task.trial.set_user_attr("worker", {**this_process(), "host": "elsewhere"})
    assert book.reclaim() == []
    counted = count_trials(book.trials())
    assert (counted["running"], counted["running_elsewhere"], counted["counted"]) == (1, 1, 0)
    assert book.ask(1) is None


def test_a_process_number_that_was_given_again_is_another_process():
    here = this_process()
    assert alive(here) is True
    assert alive({**here, "start": "1 an-earlier-boot"}) is False
    assert alive({**here, "host": "elsewhere"}) is None


def test_an_interrupted_trial_does_not_count_and_its_values_come_again(ledger, runner):
    def run(values, name, on_round):
        if name == "trial_1":
            raise Interrupted(Outcome("failed", reason="interrupted", detail="interrupted by the user"))
        return Outcome("complete", (values["x"],))

    book = ledger()
    with pytest.raises(KeyboardInterrupt):
        work(book, runner(run), 3, nothing)
    assert reason_of(book.trials()[1]) == "interrupted"
    work(book, runner(run), 3, nothing)
    whole = ledger(name="whole")
    work(whole, runner(lambda values, name, on_round: Outcome("complete", (values["x"],))), 3, nothing)
    assert drawn(book) == drawn(whole)


def test_ctrl_c_before_a_trial_begins_leaves_none_running(ledger, runner):
    book = ledger()

    def stop(task, number):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(book, runner(), 2, stop)
    assert [reason_of(trial) for trial in book.trials()] == ["interrupted"]


def test_a_trial_whose_end_could_not_be_written_is_reclaimed_by_the_same_process(ledger, runner, monkeypatch):
    book, other = ledger(), ledger()
    seen = []

    def run(values, name, on_round):
        seen.extend(other.reclaim())  # another study object of this process leaves a running trial alone
        return Outcome("complete", (1.0,))

    def broken(*arguments, **options):
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(book.study, "tell", broken)
        with pytest.raises(StorageError):
            work(book, runner(run), 2, nothing)
    assert [trial.state for trial in book.trials()] == [TrialState.RUNNING]
    assert (seen, ledger().reclaim(), ledger().reclaim()) == ([], [0], [])
    work(book, runner(run), 2, nothing)
    assert count_trials(book.trials())["complete"] == 2


# -- resume -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "nsgaii"])
@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_a_study_in_two_parts_equals_one_in_one_part(ledger, runner, sampler, pruner):
    settings = {"sampler": sampler, "pruner": pruner, "startup": 2}
    for total in (1, 5, 14):
        work(ledger(name="parts", **settings), runner(), total, nothing)
    whole = ledger(name="parts", storage=None, **settings)
    # Hyperband draws its brackets from the study's name: the second study has the same one, elsewhere.
    other = ledger(name="parts", storage=f"journal:{whole.directory / 'other.log'}", **settings)
    work(other, runner(), 14, nothing)
    assert drawn(whole) == drawn(other)
    assert len({str(trial.params) for trial in other.trials()}) > 10


def test_another_seed_draws_other_values(ledger, runner):
    books = [ledger(name=f"seed{seed}", seed=seed) for seed in (0, 1)]
    for book in books:
        work(book, runner(), 2, nothing)
    assert drawn(books[0]) != drawn(books[1])


def test_other_settings_are_refused_with_what_differs(ledger, binary):
    ledger()
    with pytest.raises(ValueError, match=r"'toy'.*begun with other settings: objective was \['val/dbi:min'\]"):
        ledger(objective="acc")
    with pytest.raises(ValueError, match=r"space\.a was None.*--study-name"):
        ledger(space=binary)
    with pytest.raises(ValueError, match=r"configuration\.trainer\.max_epochs was 2, is 3"):
        ledger(more={"config": {"trainer": {"max_epochs": 3}, "seed_everything": 0}})
    assert ledger(sampler="random", pruner="none").trials() == []


def test_a_study_of_somebody_else_is_refused(ledger, tmp_path):
    import optuna

    optuna.create_study(study_name="toy", storage=f"sqlite:///{tmp_path / 'a.db'}").add_trial(
        optuna.create_trial(value=1.0)
    )
    with pytest.raises(ValueError, match=r"'toy' in sqlite.*not made by fedclust tune"):
        ledger(storage=f"sqlite:///{tmp_path / 'a.db'}")


# -- I6: duplicates -----------------------------------------------------------------------------------------------


def test_completed_values_are_taken_over_and_counted(ledger, runner, binary):
    book = ledger(space=binary, sampler="random")
    run = runner(lambda values, name, on_round: Outcome("complete", (values["a"] + 2.0 * values["b"],), rounds=2))
    work(book, run, 10, nothing)
    trials = book.trials()
    assert len(trials) == 10
    assert all(trial.state == TrialState.COMPLETE for trial in trials)
    assert len(run.ran) == len({str(trial.params) for trial in trials}) <= 4
    for trial in trials:
        assert trial.value == trial.params["a"] + 2.0 * trial.params["b"]
        first = next(other for other in trials if other.params == trial.params)
        assert reused_from(trial) == (None if first.number == trial.number else first.number)
    counted = count_trials(trials)
    assert (counted["complete"], counted["reused"]) == (10, 10 - len(run.ran))
    again = ledger(space=binary, sampler="random", rerun_duplicates=True, name="again")
    run = runner(run.run)
    work(again, run, 10, nothing)
    assert (len(run.ran), count_trials(again.trials())["reused"]) == (10, 0)
