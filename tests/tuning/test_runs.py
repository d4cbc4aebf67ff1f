"""Real runs, as small as can be: what is sampled is what runs, and what runs can be run again by itself."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml

import fedclust
from fedclust.algorithms.feddcn import FedDCN
from fedclust.cli import main
from tuning.blueprint import make_blueprint
from tuning.objectives import NoSuchMetricError, parse_objectives
from tuning.pruning import Pruned
from tuning.space import load_space, shipped_spaces
from tuning.study import Study
from tuning.trial import Interrupted, Runner

ALGORITHM, CLIENT = "model.init_args.algorithm.init_args.", "model.init_args.client.init_args."
SMALL = [
    "--trainer.max_epochs=2", "--data.init_args.partition.init_args.n_clients=2",
    *(f"--{ALGORITHM}{name}=1" for name in ("pretrain_epochs", "cluster_epochs", "round_epochs")),
    f"--{ALGORITHM}n_synthetic=60", f"--{CLIENT}hidden_dims=[8]", f"--{CLIENT}n_clusters=3",
    f"--{CLIENT}batch_size=256",
]  # fmt: skip
SPACE = {
    "parameters": {
        f"{CLIENT}latent_dim": {"kind": "categorical", "choices": [2, 3]},
        f"{CLIENT}lr": {"kind": "log_float", "low": 1e-3, "high": 1e-1},
        f"{CLIENT}hidden_dims": {"kind": "layers", "choices": ["8", "8-4"]},
    }
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch, quick_umap):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCLUST_DEBUG", raising=False)
    torch.set_num_threads(1)


def rows(path):
    with Path(path).open(newline="") as file:
        return [
            {name: value for name, value in row.items() if not name.startswith("seconds/")}
            for row in csv.DictReader(file)
        ]


@pytest.fixture
def command(capsys):
    def run(*arguments):
        code = main(["tune", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


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


WRONG = {
    "unknown path": ({f"{CLIENT}depth": {"kind": "int", "low": 1, "high": 2}}, [f"{CLIENT}depth = 1", "depth"]),
    "wrong type": ({f"{CLIENT}lr": {"kind": "categorical", "choices": ["fast"]}}, ["lr = fast", "float"]),
    "range too wide": ({f"{CLIENT}lr": {"kind": "float", "low": -1, "high": 1}}, ["lr = -1", "lr"]),
}


@pytest.mark.parametrize(("parameters", "words"), WRONG.values(), ids=WRONG)
def test_a_space_that_does_not_fit_is_refused_before_any_trial(command, tmp_path, parameters, words):
    (tmp_path / "space.yaml").write_text(yaml.safe_dump({"parameters": parameters}))
    code, out, err = command("--config", "feddcn_digits", "--space", "space.yaml", *SMALL)
    assert (code, out) == (2, "")
    for word in ("space.yaml", "does not take", *words):
        assert word in err
    assert not Path("runs").exists()


def test_usage_mistakes(command):
    for arguments, words in (
        (["--space", "feddcn", "--objective", "val/dbj:min"], ["'val/dbj'", "val/dbi", "val/silhouette"]),
        (["--space", "feddcn", "--objective", "test/acc"], ["test split"]),
        (["--space", "feddcn", "--name", "x"], ["--name", "--study-name"]),
        (["--space", "feddcn", "--trainer.nope", "1"], ["--trainer.nope"]),
        (["--space", "feddcn", "--trials", "0"], ["trials", "0"]),
        (["--space", "feddcn", "--storage", "study.db"], ["--storage", "study.db"]),
        (["--space", "nothing"], ["'nothing'", "feddcn"]),
    ):
        code, out, err = command("--config", "feddcn_digits", *arguments)
        assert (code, out) == (2, ""), err
        assert all(word in err for word in words), err
        assert not Path("runs").exists()
    code, out, _ = command("--help")
    assert code == 0
    for word in ("--requeue", "hyperband", "nsgaii", "flameche", "silhouette", "val/NAME:min", "layers", "130"):
        assert word in out
    assert command("--config", "feddcn_digits")[0] == 2


def test_the_default_objective_of_a_method_that_has_none_lists_what_there_is(command):
    code, _, err = command("--config", "fmcl_digits", "--space", "fmcl")
    assert code == 2
    assert "'val/dbi'" in err
    assert "val/acc_mean" in err
    assert "loss = train/loss" in err


def test_all_trials_failing_ends_with_a_summary(command, tmp_path, monkeypatch):
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    evaluate = FedDCN.evaluate
    monkeypatch.setattr(FedDCN, "evaluate", lambda *a: {**evaluate(*a), "dbi": float("inf")})
    code, out, err = command("--config", "feddcn_digits", "--space", "space.yaml", "--trials", "2", *SMALL)
    assert code == 1
    assert "2 of 2: 0 complete, 0 pruned, 2 failed (2 infinite)" in out
    assert "no trial of the study 'tune_feddcn_digits' is complete" in err
    summary = json.loads(Path("runs/tune_feddcn_digits/study.json").read_text())
    assert summary["best"] is None
    assert all(entry["params"] for entry in summary["failures"])
    assert not Path("runs/tune_feddcn_digits/best.yaml").exists()


def test_ctrl_c_in_a_trial(command, tmp_path, monkeypatch):
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    evaluate, calls = FedDCN.evaluate, []

    def stops(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr(FedDCN, "evaluate", stops)
    arguments = ["--config", "feddcn_digits", "--space", "space.yaml", "--repeats", "0", "--no-figures", *SMALL]
    code, out, _ = command(*arguments, "--trials", "3")
    assert code == 130
    assert "the same command goes on" in out
    summary = json.loads(Path("runs/tune_feddcn_digits/study.json").read_text())
    assert summary["status"] == "interrupted"
    assert (summary["counts"]["complete"], summary["counts"]["interrupted"]) == (1, 1)
    code, out, err = command(*arguments, "--trials", "2")
    assert code == 0, err
    assert "2 of 2: 2 complete" in out


def test_a_metric_that_only_the_first_round_can_tell(tmp_path):
    study = Study(
        "dcn_digits_centralised", {"parameters": {"model.init_args.lr": {"kind": "float", "low": 0.001, "high": 0.01}}},
        "val/nothing:min", repeats=0, figures=False, progress=False,
        overrides=["--trainer.max_epochs=1", "--model.init_args.geometry_weight=0"],
    )  # fmt: skip
    with pytest.raises(NoSuchMetricError, match=r"'val/nothing' was not logged by round 1; there are .*val/dbi"):
        study.run(3)
    assert json.loads(Path("runs/tune_dcn_digits_centralised/study.json").read_text())["counts"]["counted"] == 1


QUICK = {
    "feddcn": ("feddcn_digits", "dbi", [argument for argument in SMALL if "hidden_dims" not in argument]),
    "pa_cfl": ("pa_cfl_digits", "loss", ["--data.init_args.partition.init_args.clients_per_group=1"]),
    "fmcl": ("fmcl_digits", "acc_mean", ["--data.init_args.partition.init_args.clients_per_group=1"]),
    "flameche": ("flameche_digits", "loss", ["--data.init_args.partition.init_args.n_clients=8"]),
}


@pytest.mark.parametrize("name", sorted(shipped_spaces()))
def test_shipped_spaces_run_on_their_digits(name):
    config, objective, small = QUICK[name]
    result = Study(
        config, name, objective, repeats=0, figures=False, progress=False, overrides=[*small, "--trainer.max_epochs=1"]
    ).run(1)
    assert result.summary["counts"]["counted"] == 1
    assert result.best["uses_labels"] is (objective == "acc_mean")
    assert set(result.best["params"]) <= {parameter.name for parameter in load_space(name).parameters}
    assert fedclust.load(result.best["directory"]).metrics.keys() == result.best["metrics"].keys()
