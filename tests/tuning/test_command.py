"""The command with real runs: what it refuses before any trial, how it ends, and the spaces that it ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from small_study import CLIENT, SMALL, SPACE

import fedclust
from fedclust.algorithms.feddcn import FedDCN
from tuning.objectives import NoSuchMetricError
from tuning.space import load_space, shipped_spaces
from tuning.study import Study

pytestmark = pytest.mark.usefixtures("elsewhere")

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


def test_a_study_needs_a_configuration(command):
    code, _, err = command("--space", "feddcn")
    assert code == 2
    assert "fedclust tune needs a configuration: --config NAME" in err
    assert "--ckpt_path" not in err


def test_the_default_objective_of_a_classifier_is_refused_with_one_that_works(command):
    code, _, err = command("--config", "fmcl_digits", "--space", "fmcl", "--trials", "1")
    assert code == 2
    assert "val/dbi will not be logged" in err
    assert "say --objective acc_mean" in err


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
    validated = {metric for metric in result.best["metrics"] if metric.startswith("val/")}
    assert fedclust.load(result.best["directory"]).metrics.keys() == validated != set()
