"""Real runs, as small as can be: what is sampled is what runs, and what runs can be run again by itself."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml
from small_study import ALGORITHM, SMALL, SPACE

from fedclust.algorithms.feddcn import FedDCN
from fedclust.cli import main
from fedclust.federation.backend import InProcess
from tuning.blueprint import make_blueprint
from tuning.objectives import parse_objectives
from tuning.pruning import Pruned
from tuning.space import load_space
from tuning.study import Study
from tuning.trial import Interrupted, Runner

pytestmark = pytest.mark.usefixtures("elsewhere")


def rows(path):
    with Path(path).open(newline="") as file:
        return [
            {name: value for name, value in row.items() if not name.startswith("seconds/")}
            for row in csv.DictReader(file)
        ]


def test_a_study_from_the_first_trial_to_the_best_configuration(command, tmp_path, quick_umap):
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    arguments = [
        "--config", "feddcn_digits", "--space", "space.yaml", "--pruner", "none", "--repeats", "1", "--no-figures",
        "--study-name", "small", *SMALL,
    ]  # fmt: skip
    code, out, err = command(*arguments, "--trials", "2")
    assert code == 0, err
    code, out, err = command(*arguments, "--trials", "4")
    assert code == 0, err
    assert out.splitlines()[-1] == "study: runs/small"
    directory = Path("runs/small")
    summary = json.loads((directory / "study.json").read_text())
    assert summary["counts"]["complete"] == 4
    assert "best val/dbi" in err
    assert "test/acc" in out
    best = summary["best"]

    # What was sampled is what ran, and the value is that of the round that the run selected.
    for trial in range(4):
        run = directory / f"trial_{trial}" / "version_0"
        config = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["client"]["init_args"]
        (row,) = [row for row in rows(directory / "trials.csv") if row["trial"] == str(trial)]
        assert config["latent_dim"] == int(row["params/latent_dim"])
        assert config["lr"] == float(row["params/lr"])
        assert config["hidden_dims"] == [int(width) for width in row["params/hidden_dims"].split("-")]
        ran = json.loads((run / "summary.json").read_text())
        assert not any(name.startswith("test/") for name in ran["metrics"])
        assert float(row["val/dbi (min)"]) == ran["metrics"]["val/dbi"]
        assert [path.name for path in (run / "checkpoints").iterdir()] == ["best.ckpt"]

    # Embeddings depend on the latent width only: computed once per width, used by all trials and runs of both commands.
    widths = {row["params/latent_dim"] for row in rows(directory / "trials.csv")}
    assert summary["saved"]["data_reused"] == 2
    assert summary["saved"]["embeddings_reused"] > 0
    real_rows = summary["saved"]["embeddings_computed"] - 4  # the synthetic rows of each trial are its own
    assert real_rows == 2 * len(widths)

    # The best configuration runs as it is, without any cache, and gives the same bits.
    again = main(["fit", "--config", str(directory / "best.yaml")])
    assert again == 0
    assert (directory / "best.yaml").read_text().startswith("# Best trial of the study small: trial ")
    alone = Path("runs/small_best/version_0")
    trial = Path(best["directory"])
    assert rows(alone / "metrics.csv") == rows(trial / "metrics.csv")
    assert json.loads((alone / "summary.json").read_text())["metrics"]["val/dbi"] == best["values"]["val/dbi:min"]
    repeats = json.loads((directory / "repeats.json").read_text())
    assert repeats["runs"][0]["metrics"]["val/dbi"] == best["values"]["val/dbi:min"]
    assert "test/acc" in repeats["table"]
    assert not any("test" in name for name in best["metrics"])


@pytest.fixture
def made():
    """A runner of the small configuration."""

    def make(objective="dbi", space=SPACE, config="feddcn_digits", extra=(), small=SMALL):
        plan = make_blueprint(
            ["--config", config, *small, *extra], load_space(space), parse_objectives(objective)
        )  # fmt: skip
        directory = Path("runs/made")
        directory.mkdir(parents=True, exist_ok=True)
        return Runner(plan, directory)

    return make


VALUES = {"latent_dim": 2, "lr": 0.01, "hidden_dims": "8"}


def test_a_pruned_run_stops_after_the_round_and_leaves_no_checkpoint(made):
    seen = []

    def bad(number, values):
        seen.append((number, values))
        return number == 1

    outcome = made().trial(VALUES, "trial_0", bad)
    assert (outcome.state, outcome.rounds, len(seen)) == ("pruned", 1, 1)
    run = Path(outcome.directory)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["error"]) == ("pruned", 1, None)
    assert "pruned after round 1" in summary["notes"]
    assert len(rows(run / "metrics.csv")) == 1
    assert seen[0][1] == [float(rows(run / "metrics.csv")[0]["val/dbi"])]
    assert not (run / "checkpoints").exists()
    assert str(Pruned(3)) == "pruned after round 3"


def test_every_trial_ends_its_backend_and_lets_go_of_its_trainer(made, monkeypatch):
    runner, closed = made(), []
    monkeypatch.setattr(InProcess, "close", lambda self: closed.append(self), raising=False)
    assert runner.trial(VALUES, "trial_0", lambda number, values: False).state == "complete"
    assert runner.trial(VALUES, "trial_1", lambda number, values: True).state == "pruned"

    def fail(number, values):
        raise ValueError("no luck")

    assert runner.trial(VALUES, "trial_2", fail).state == "failed"
    assert len(closed) == len(set(closed)) == 3
    assert runner.shared.data_reused == 2
    assert runner.shared._data[1].trainer is None


def test_loss_adds_the_unweighted_terms(made):
    runner = made("loss")
    assert runner.blueprint.terms == ("train/recon", "train/clust", "train/geom")
    reported = []
    outcome = runner.trial(VALUES, "trial_0", lambda number, values: reported.append(values[0]))
    logged = rows(Path(outcome.directory) / "metrics.csv")
    for value, row in zip(reported, logged, strict=True):
        assert value == pytest.approx(sum(float(row[f"train/{name}"]) for name in ("recon", "clust", "geom")))
    weights = yaml.safe_load((Path(outcome.directory) / "config.yaml").read_text())["model"]["init_args"]["algorithm"]
    weights = weights["init_args"]
    weighted = sum(
        weights[weight] * float(logged[-1][f"train/{name}"])
        for weight, name in (("recon_weight", "recon"), ("cluster_weight", "clust"), ("geometry_federated", "geom"))
    )
    assert float(logged[-1]["train/loss"]) == pytest.approx(weighted, rel=1e-4)
    selected = json.loads((Path(outcome.directory) / "summary.json").read_text())["selected_round"]
    assert outcome.values == (reported[selected - 1],)


@pytest.mark.parametrize("choices", [[0.01, 0.0], [0.0, 0.01]])
def test_what_loss_means_does_not_depend_on_the_order_of_choices(made, choices):
    weight = {f"{ALGORITHM}cluster_weight": {"kind": "categorical", "choices": choices}}
    blueprint = made("loss", {"parameters": weight}).blueprint
    assert sorted(blueprint.terms) == ["train/clust", "train/geom", "train/recon"]


def test_errors_collapses_and_values_that_are_not_finite_fail_the_trial(made, monkeypatch):
    runner = made("dbi,silhouette")
    whole = runner.trial(VALUES, "trial_0", lambda number, values: False)
    assert whole.state == "complete"
    assert -1 <= whole.values[1] <= 1
    evaluate = FedDCN.evaluate
    for change, reason in (
        ({"dbi": float("nan")}, "nan"),
        ({"silhouette": float("-inf")}, "infinite"),
        ({"collapsed": 1.0}, "collapsed"),
    ):
        monkeypatch.setattr(FedDCN, "evaluate", lambda *a, change=change: {**evaluate(*a), **change})
        outcome = runner.trial(VALUES, "trial_1", lambda number, values: False)
        assert (outcome.state, outcome.reason, outcome.values) == ("failed", reason, ())

    def breaks(*arguments):
        raise ZeroDivisionError("no luck")

    monkeypatch.setattr(FedDCN, "evaluate", breaks)
    outcome = runner.trial(VALUES, "trial_2", lambda number, values: False)
    assert (outcome.state, outcome.reason) == ("failed", "error")
    assert "no luck" in outcome.detail
    assert json.loads((Path(outcome.directory) / "summary.json").read_text())["status"] == "failed"

    def stops(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(FedDCN, "evaluate", stops)
    with pytest.raises(Interrupted) as stop:
        runner.trial(VALUES, "trial_3", lambda number, values: False)
    assert stop.value.outcome.reason == "interrupted"
    monkeypatch.setattr(FedDCN, "evaluate", evaluate)
    again = runner.trial(VALUES, "trial_4", lambda number, values: False)
    assert (again.values, again.metrics) == (whole.values, whole.metrics)


def test_what_is_reused_changes_no_bit(made, quick_umap):
    shared = made()
    first = shared.trial(VALUES, "trial_0", lambda number, values: False)
    second = shared.trial(VALUES, "trial_1", lambda number, values: False)
    assert shared.shared.counts()["data_reused"] == 1
    assert shared.shared.counts()["embeddings_reused"] > 0
    assert rows(f"{first.directory}/metrics.csv") == rows(f"{second.directory}/metrics.csv")
    other_seed = shared.repeat(VALUES, "repeat_seed_1", 1)
    assert shared.shared.counts()["data_reused"] == 1
    assert "test/acc" in other_seed.metrics
    assert other_seed.metrics["val/dbi"] != first.metrics["val/dbi"]


def test_two_studies_do_not_share_a_directory(tmp_path):
    def study(storage, *more):
        return Study("feddcn_digits", SPACE, name="one", storage=storage, overrides=[*SMALL, *more], progress=False)

    study(None).prepare(1)
    base = Path("runs/one/base.yaml").read_text()
    assert base.startswith("# study ")
    with pytest.raises(ValueError, match=r"runs/one is the directory of a study with another.*--study-name"):
        study("sqlite:///other.db", "--trainer.max_epochs=3").prepare(1)
    assert Path("runs/one/base.yaml").read_text() == base
    study(None, "--trainer.enable_progress_bar=false").prepare(1)
