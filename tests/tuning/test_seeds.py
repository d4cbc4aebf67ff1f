"""The seed of a study's runs, where the configuration gives the data module one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_study import SMALL, SPACE

from tuning.blueprint import make_blueprint
from tuning.objectives import parse_objectives
from tuning.repeat import repeat_best
from tuning.space import load_space
from tuning.trial import Runner

VALUES = {"latent_dim": 2, "lr": 0.01, "hidden_dims": "8"}
DATA_SEED = "data.init_args.seed"


def plan(*extra, space=SPACE, **options):
    arguments = ["--config", "feddcn_digits", *SMALL, "--trainer.max_epochs=1", *extra]
    return make_blueprint(arguments, load_space(space), parse_objectives("dbi"), **options)


@pytest.mark.usefixtures("elsewhere")
def test_a_repetition_has_other_seeds_although_the_data_has_one(tmp_path):
    made = plan(f"--{DATA_SEED}=7")
    assert (made.seed, made.runs_seed) == (7, 7)
    report = repeat_best(Runner(made, tmp_path), VALUES, (0, 1), lambda text: None)
    values = [run["metrics"]["val/dbi"] for run in report["runs"]]
    assert report["table"]["val/dbi"]["n"] == 2
    assert values[0] != values[1]
    for run in report["runs"]:
        assert f"seed: {run['seed']}\n" in (Path(run["directory"]) / "config.yaml").read_text()


@pytest.mark.usefixtures("elsewhere")
def test_which_seed_is_the_runs_and_which_the_samplers():
    made = plan("--seed_everything=3")
    assert (made.seed, made.runs_seed) == (3, 3)
    assert made.under_seed(VALUES, 5)[-1] == "--seed_everything=5"
    made = plan(f"--{DATA_SEED}=7", seed=2)
    assert (made.seed, made.runs_seed) == (2, 7)
    assert made.under_seed(VALUES, 5)[-2:] == ["--seed_everything=5", f"--{DATA_SEED}=5"]
    drawn = plan(space={"parameters": {DATA_SEED: {"kind": "int", "low": 1, "high": 9}}})
    assert drawn.under_seed({"seed": 4}, 5) == [f"--{DATA_SEED}=4", "--seed_everything=5", f"--{DATA_SEED}=5"]
