"""What a study leaves: counts with reasons, files, figures where they can be drawn, and labels marked everywhere."""

from __future__ import annotations

import csv
import json
import sys

import pytest

from tuning.engine import work
from tuning.figures import draw_figures
from tuning.study import NoBestTrialError, StudyResult, no_best
from tuning.summary import summarise, table, write_study, write_trials
from tuning.trial import Outcome


def nothing(task, number):
    pass


def mixed(values, name, on_round):
    number = int(name.removeprefix("trial_"))
    if number in (1, 4):
        return Outcome("failed", reason="collapsed", detail="the clustering is degenerate", seconds=1.0)
    if number == 2:
        on_round(1, [3.0])
        return Outcome("pruned", rounds=1, seconds=1.0)
    value = (values["x"] - 0.3) ** 2
    return Outcome("complete", (value,), metrics={"val/dbi": value, "val/acc": 0.5}, rounds=2, seconds=2.0)


@pytest.fixture
def studied(ledger, runner):
    def make(run=mixed, total=8, **more):
        book = ledger(**more)
        work(book, runner(run), total, nothing)
        return book

    return make


def test_study_json(studied):
    book = studied()
    summary = summarise(book, 8, 1.5, "completed")
    write_study(book.directory, summary)
    read = json.loads((book.directory / "study.json").read_text(), parse_constant=pytest.fail)
    counted = read["counts"]
    assert (counted["counted"], counted["complete"], counted["pruned"], counted["failed"]) == (8, 5, 1, 2)
    assert counted["failed_by_reason"] == {"collapsed": 2}
    values = {trial.number: trial.value for trial in book.trials() if trial.state.name == "COMPLETE"}
    assert read["best"]["trial"] == min(values, key=values.get)
    assert read["best"]["values"] == {"val/dbi:min": min(values.values())}
    assert read["best"]["params"] == book.trials()[read["best"]["trial"]].params
    assert (read["uses_labels"], read["objectives"]) == (False, ["val/dbi:min"])
    assert [entry["trial"] for entry in read["failures"]] == [1, 4]
    assert read["failures"][0]["params"] == book.trials()[1].params
    assert read["importances"]["val/dbi:min"]["x"] > 0.5
    assert (read["sampler"], read["pruner"], read["seeds"]["sampler"]) == ("tpe", "median", 0)
    assert read["seconds_of_trials"] == 13.0
    assert {"optuna", "torch", "python"} <= set(read["versions"])
    shown = "\n".join(table(summary))
    for words in (
        "8 of 8: 5 complete, 1 pruned, 2 failed (2 collapsed)", "uses no labels", "trial 1: collapsed", "importances",
        "x = ", "saved        data ",
    ):  # fmt: skip
        assert words in shown


def test_importances_of_few_trials_say_so(studied, monkeypatch):
    book = studied()  # five complete trials
    counted = len(summarise(book, 8, 1.5, "completed")["importances"]["val/dbi:min"])
    monkeypatch.setattr("tuning.summary._TRIALS_PER_PARAMETER", 5 // counted)
    assert not any(note.startswith("importances rest") for note in summarise(book, 8, 1.5, "completed")["notes"])
    monkeypatch.setattr("tuning.summary._TRIALS_PER_PARAMETER", 6)
    notes = summarise(book, 8, 1.5, "completed")["notes"]
    assert f"importances rest on 5 complete trials for {counted} parameters: a hint at best" in notes


def test_trials_csv(studied):
    book = studied()
    write_trials(book.directory, book.trials(), book.blueprint)
    with (book.directory / "trials.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == [str(number) for number in range(8)]
    assert [row["state"] for row in rows[:3]] == ["complete", "fail", "pruned"]
    assert (rows[1]["reason"], rows[2]["rounds"]) == ("collapsed", "1")
    assert float(rows[0]["val/dbi (min)"]) == book.trials()[0].value
    assert rows[1]["val/dbi (min)"] == rows[2]["val/dbi (min)"] == ""
    assert float(rows[0]["params/x"]) == book.trials()[0].params["x"]


def test_labels_are_marked(studied):
    book = studied(objective="acc", more={"labels": (True,)})
    summary = summarise(book, 8, 1.5, "completed")
    assert summary["uses_labels"] is True
    assert summary["best"]["uses_labels"] is True
    shown = "\n".join(table(summary))
    assert "(uses labels)" in shown
    assert "no labels" not in shown
    write_trials(book.directory, book.trials(), book.blueprint)
    assert "val/acc (max, uses labels)" in (book.directory / "trials.csv").read_text().splitlines()[0]


def test_no_best_trial(studied):
    fails = lambda values, name, on_round: Outcome("failed", reason="nan", detail="val/dbi is nan")  # noqa: E731
    book = studied(fails, total=3)
    summary = summarise(book, 3, 1.0, "completed")
    assert summary["best"] is None
    result = StudyResult(book.directory, summary, book.trials())
    for ask in (lambda: result.best, lambda: result.best_config):
        with pytest.raises(NoBestTrialError, match=r"no trial of the study 'toy' is complete.*3 failed \(3 nan\)"):
            ask()
    assert "3 failed (3 nan)" in no_best(summary)
    shown = "\n".join(table(summary))
    assert "best         none" in shown
    assert shown.count("val/dbi is nan") == 3


def test_importances_of_one_trial_are_a_note(studied):
    book = studied(total=1)
    summary = summarise(book, 1, 1.0, "completed")
    assert summary["importances"] is None
    assert summary["notes"][0].startswith("importances could not be computed: ")


def test_figures(studied):
    book = studied()
    files, notes = draw_figures(book.study, book.blueprint, book.directory / "figures")
    assert notes == []
    assert set(files) == {f"{name}.{end}" for name in ("history", "importances", "slice") for end in ("png", "html")}
    assert (book.directory / "figures/history.png").read_bytes().startswith(b"\x89PNG")
    html = (book.directory / "figures/history.html").read_text()
    assert "val\\u002fdbi (min, uses no labels)" in html or "val/dbi (min, uses no labels)" in html


def test_a_front_has_its_figure(studied):
    def run(values, name, on_round):
        return Outcome("complete", (values["x"], -values["x"]), rounds=1)

    book = studied(run, total=4, objective="dbi,acc", more={"labels": (False, True)})
    files, notes = draw_figures(book.study, book.blueprint, book.directory / "figures")
    assert "pareto_front.png" in files, notes
    assert {"history_val_dbi.png", "slice_val_acc.html"} <= set(files), notes
    summary = summarise(book, 4, 1.0, "completed")
    assert summary["uses_labels_by_objective"] == {"val/dbi:min": False, "val/acc:max": True}
    assert summary["front"][0].keys() == summary["best"].keys()
    assert "never pruned" in summary["pruner"]
    assert "Pareto front" in "\n".join(table(summary))


def test_figures_that_cannot_be_drawn_are_notes(studied, monkeypatch):
    book = studied(total=1)
    files, notes = draw_figures(book.study, book.blueprint, book.directory / "figures")
    assert {"history.png", "history.html"} <= set(files)
    assert notes == ["no figure of importances: they need complete trials with different values"]
    monkeypatch.setattr("optuna.visualization.plot_slice", lambda *arguments, **options: 1 / 0)
    files, notes = draw_figures(book.study, book.blueprint, book.directory / "figures")
    assert "slice.html" not in files
    assert "figure slice.html could not be drawn: division by zero" in notes
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files, notes = draw_figures(book.study, book.blueprint, book.directory / "none")
    assert files == []
    assert all("pip install 'fedclust[figures]'" in note for note in notes[1:])
    assert len(notes) == 3
    assert not (book.directory / "none").exists()
