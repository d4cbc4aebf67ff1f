"""Mistakes that a second review and a second first user met once."""

from __future__ import annotations

import csv
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping, Timer

import fedclust
from fedclust.cli import main
from fedclust.clustering.kmeans import kmeans
from fedclust.federation.averaging import weighted_average
from lightning_modules import FMCLClient

QUICK = [
    "--model.algorithm.pretrain_epochs=1", "--model.algorithm.cluster_epochs=1", "--model.algorithm.round_epochs=1",
    "--model.algorithm.n_synthetic=50", "--model.algorithm.geometry_pretrain=0",
    "--model.algorithm.geometry_federated=0", "--trainer.enable_progress_bar=false",
]  # fmt: skip


def fit(folder: Path, rounds: int, *more: str) -> tuple[int, dict[str, Any], Path]:
    code = main(
        ["fit", "--config", "feddcn_digits", f"--trainer.max_epochs={rounds}", f"--runs_root={folder}", *QUICK, *more]
    )
    runs = sorted(folder.glob("feddcn_digits/version_*"))
    if not runs:
        return code, {}, folder
    return code, json.loads((runs[-1] / "summary.json").read_text()), runs[-1]


def test_bytes_of_a_run_hold_the_final_test_and_all_rounds(tmp_path: Path) -> None:
    code, summary, run = fit(tmp_path, 3)
    assert code == 0
    # Three validations and the test: each of 5 clients sends 10 distance sums and two silhouettes in float64.
    assert summary["bytes"]["disperse"]["up"] == 4 * 5 * 96
    with (run / "metrics.csv").open() as file:
        rows = [float(row["bytes/up"]) for row in csv.DictReader(file)]
    one_round = (summary["bytes"]["update"]["up"] + summary["bytes"]["cluster"]["up"]) / 3
    assert rows[0] == one_round
    assert rows[1] == rows[2] > one_round
    # A note on training belongs to a fit only.
    assert main(["test", "--ckpt_path", str(run / "checkpoints" / "best.ckpt"), f"--runs_root={tmp_path}"]) == 0
    tested = json.loads((sorted(tmp_path.glob("feddcn_digits/version_*"))[-1] / "summary.json").read_text())
    assert tested["command"] == "test"
    assert not [note for note in tested["notes"] if "nothing was left" in note]


def test_without_a_finite_monitor_the_last_round_is_taken_and_noted(tmp_path: Path) -> None:
    code, summary, run = fit(tmp_path, 3, "--model.client.n_clusters=1")
    assert code == 0
    with (run / "metrics.csv").open() as file:
        assert {row["val/dbi"] for row in csv.DictReader(file)} == {"inf"}
    assert (summary["selected"], summary["selected_round"]) == ("best", 3)
    assert any("val/dbi" in note and "the last one is taken" in note for note in summary["notes"])


def test_a_finite_round_beats_those_without_a_finite_monitor(feddcn: Any, dcn: Any, blobs: Any) -> None:
    class Spoil(Callback):
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch != 1:
                module.latest["val/dbi"] = math.inf
                trainer.callback_metrics["val/dbi"] = torch.tensor(math.inf)
                module.log("val/dbi", math.inf)

    result = fedclust.federate(feddcn(), dcn(), blobs(), 3, progress=False, callbacks=[Spoil()])
    assert result.summary["selected_round"] == 2


class Interrupt(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 2:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal; whoever started the tests may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_names_its_best_round(feddcn: Any, dcn: Any, blobs: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fedclust.federate(
            feddcn(), dcn(), blobs(), 5, progress=False, callbacks=[Interrupt()], directory=tmp_path / "run"
        )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["selected_round"] in (1, 2, 3)
    assert summary["checkpoint"] == "checkpoints/best.ckpt"
    assert "val/dbi" in summary["metrics"]


@pytest.mark.parametrize(("rounds", "text"), [(0, "at least one round"), (-1, "never ends")])
def test_runs_without_an_end_or_a_round_are_refused(tmp_path: Path, capsys: Any, rounds: int, text: str) -> None:
    code, summary, _ = fit(tmp_path, rounds)
    assert (code, summary) == (2, {})
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("end", [Timer(duration="00:00:00:00"), EarlyStopping("val/recon", patience=1, min_delta=1.0)])
def test_a_run_that_ends_by_itself_needs_no_number_of_rounds(
    toy: Any, blobs: Any, trainer: Any, end: Any, feddcn: Any, dcn: Any
) -> None:
    with_trainer = trainer(-1, callbacks=[end])
    with_trainer.fit(fedclust.FederatedLoop(feddcn(), dcn()), datamodule=blobs())
    assert with_trainer.current_epoch < 5


def test_one_far_row_does_not_make_other_centres_equal() -> None:
    groups = [np.full((20, 1), v) + 0.01 * np.random.default_rng(v).standard_normal((20, 1)) for v in (0, 4, 8)]
    x = np.concatenate([*groups, [[1e7]]]).astype(np.float32)
    result = kmeans(x, 4, init=np.array([[0.0], [4.0], [8.0], [1e7]], dtype=np.float32))
    assert result.n_populated == 4
    assert np.allclose(np.sort(result.centers.ravel()), [0, 4, 8, 1e7], atol=0.02)


def test_averages_beyond_the_range_of_their_type_are_refused() -> None:
    large = torch.tensor(1.7e308, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"average of a is beyond the range of torch\.float64"):
        weighted_average([{"a": large}, {"a": -large}], [1, 1])


@pytest.mark.parametrize(
    ("weights", "text"),
    [(["a", 1], "client 0: its weight must be a number.*'a'"), ([1, None], "client 1: its weight"),
     ([True, True], "client 0: its weight.*True"), ([1e308, 1e308], "too large to be added")],
)  # fmt: skip
def test_bad_weights_name_the_client(weights: list[Any], text: str) -> None:
    state = {"a": torch.zeros(1)}
    with pytest.raises(ValueError, match=text):
        weighted_average([state, state], weights)


@pytest.mark.parametrize("alpha", [math.nan, "0.5", None, True, 0, -1, math.inf])
def test_a_bad_alpha_hears_what_is_allowed(alpha: Any) -> None:
    with pytest.raises(ValueError, match=r"alpha must be a finite number above 0, got .*LabelGroups"):
        fedclust.Dirichlet(3, alpha)


def test_labels_that_are_nan_are_no_class() -> None:
    with pytest.raises(ValueError, match="10 of 30 labels are NaN"):
        fedclust.Dirichlet(3, 0.5).split(np.array([np.nan, 1, 2] * 10), 0)


def test_an_encoder_by_name_is_refused_where_it_is_given() -> None:
    with pytest.raises(ValueError, match=r"encoder must be an encoder.*'small_cnn'"):
        FMCLClient("small_cnn", lr=0.1)  # type: ignore[arg-type]


def test_fit_without_a_configuration_points_to_the_configurations(capsys: Any) -> None:
    assert main(["fit"]) == 2
    assert "fedclust configs" in capsys.readouterr().err


def test_a_misspelt_configuration_suggests_the_right_one(capsys: Any) -> None:
    assert main(["fit", "--config", "feddcn_digit"]) == 2
    assert "did you mean feddcn_digits?" in capsys.readouterr().err
