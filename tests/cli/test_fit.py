"""A run from `fit` to `predict`: what it writes, and that the same seed gives the same bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import yaml


def seconds_apart(rows):
    return [{name: value for name, value in row.items() if not name.startswith("seconds/")} for row in rows]


def test_fit_writes_its_directory(quick_fit, tmp_path):
    ran = quick_fit()
    assert ran.code == 0, ran.err
    assert str(ran.path) == "runs/feddcn_digits/version_0"
    assert {path.name for path in ran.path.iterdir()} == {
        "checkpoints",
        "clients.csv",
        "config.yaml",
        "metrics.csv",
        "partition.json",
        "summary.json",
    }
    assert {path.name for path in (ran.path / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt", "start.ckpt"}
    rows = ran.csv("metrics.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    names = list(rows[0])
    assert names[1:] == sorted(names[1:])
    assert {"train/recon", "val/dbi", "val/acc", "val/populated", "bytes/up", "bytes/down"} <= set(names)
    assert all(math.isfinite(float(row["val/recon"])) for row in rows)


def test_worker_processes_from_the_command_line_change_no_bit(quick_fit):
    expected, other = (quick_fit(*more) for more in ((), ("--model.backend=fedclust.Processes",)))
    assert other.code == 0, other.err
    assert seconds_apart(other.csv("metrics.csv")) == seconds_apart(expected.csv("metrics.csv"))
    assert other.json("summary.json")["metrics"] == expected.json("summary.json")["metrics"]


def test_summary_says_what_was_reached_and_how(quick_fit):
    ran = quick_fit("--seed_everything=3")
    summary = ran.json("summary.json")
    rows = ran.csv("metrics.csv")
    assert (summary["status"], summary["error"], summary["rounds"], summary["seed"]) == ("completed", None, 3, 3)
    assert (summary["monitor"], summary["monitor_mode"], summary["uses_labels"]) == ("val/dbi", "min", False)
    best = min(range(3), key=lambda index: float(rows[index]["val/dbi"]))
    assert (summary["selected"], summary["selected_round"], summary["checkpoint"]) == (
        "best",
        best + 1,
        "checkpoints/best.ckpt",
    )
    assert summary["metrics"]["val/dbi"] == float(rows[best]["val/dbi"])
    assert {"test/acc", "test/nmi", "test/ari", "test/dbi", "test/recon", "test/populated"} <= set(summary["metrics"])
    assert sum(float(row["bytes/up"]) for row in rows) <= sum(both["up"] for both in summary["bytes"].values())
    assert {"local", "server", "train", "evaluate"} <= set(summary["seconds"])
    assert set(summary["versions"]) == {
        "fedclust",
        "python",
        "torch",
        "pytorch_lightning",
        "numpy",
        "scikit-learn",
        "umap-learn",
    }
    for shown in (
        "test/acc",
        "test/nmi",
        "test/ari",
        "test/dbi",
        "bytes up",
        "bytes down",
        "val/dbi",
        "uses no labels",
    ):
        assert shown in ran.out


def test_partition_and_clients_cover_the_rows(quick_fit):
    ran = quick_fit()
    clients = ran.json("partition.json")["clients"]
    kept = [row for client in clients for split in ("train", "val", "test") for row in client[split]]
    assert sorted(kept) == list(range(1797))
    table = ran.csv("clients.csv")
    assert [int(row["client"]) for row in table] == list(range(5))
    assert [int(row["train"]) for row in table] == [len(client["train"]) for client in clients]
    assert all(int(float(row["n_steps"])) == math.ceil(int(row["train"]) / 32) for row in table)


def test_evaluation_and_prediction_from_a_checkpoint(quick_fit, command):
    fitted = quick_fit()
    best = str(fitted.path / "checkpoints" / "best.ckpt")
    metrics = fitted.json("summary.json")["metrics"]
    for verb, prefix in (("test", "test/"), ("validate", "val/")):
        ran = command(verb, "--ckpt_path", best)
        assert ran.code == 0, ran.err
        assert ran.path.parent == fitted.path.parent
        summary = ran.json("summary.json")
        assert summary["parent"] == str(fitted.path.absolute())
        assert summary["metrics"] == {name: value for name, value in metrics.items() if name.startswith(prefix)}
    predicted = command("predict", "--ckpt_path", best)
    assert predicted.code == 0, predicted.err
    rows = predicted.csv("predictions.csv")
    assert list(rows[0]) == ["row", "client", "cluster", "distance", "split"]
    assert sorted(int(row["row"]) for row in rows) == list(range(1797))
    known = {
        row: (client["client"], split)
        for client in fitted.json("partition.json")["clients"]
        for split in ("train", "val", "test")
        for row in client[split]
    }
    assert all(known[int(row["row"])] == (int(row["client"]), row["split"]) for row in rows)
    assert all(0 <= int(row["cluster"]) < 10 and float(row["distance"]) >= 0 for row in rows)


def test_same_command_twice_gives_two_directories_and_the_same_bits(quick_fit):
    first, second = quick_fit(), quick_fit()
    assert (first.path.name, second.path.name) == ("version_0", "version_1")
    assert seconds_apart(first.csv("metrics.csv")) == seconds_apart(second.csv("metrics.csv"))
    assert first.json("partition.json") == second.json("partition.json")
    other = quick_fit("--seed_everything=1")
    assert other.json("partition.json") != first.json("partition.json")


def test_saved_configuration_runs_the_same_again(quick_fit, command):
    first = quick_fit("--name", "mine")
    assert first.path.parent.name == "mine"
    again = command("fit", "--config", str(first.path / "config.yaml"))
    assert again.code == 0, again.err
    assert (again.path.parent.name, again.path.name) == ("mine", "version_1")
    assert seconds_apart(again.csv("metrics.csv")) == seconds_apart(first.csv("metrics.csv"))
    assert yaml.safe_load((again.path / "config.yaml").read_text()) == yaml.safe_load(
        (first.path / "config.yaml").read_text()
    )


def test_checkpoints_hold_plain_values_and_weights_move(quick_fit):
    ran = quick_fit()
    start, last = (
        torch.load(ran.path / "checkpoints" / f"{name}.ckpt", weights_only=True)["fedclust"]["state"]
        for name in ("start", "last")
    )
    assert not torch.equal(start["weights/encoder.0.weight"], last["weights/encoder.0.weight"])
    assert torch.equal(start["synthetic"], last["synthetic"])


def test_without_labels_label_metrics_are_left_out(command, quick, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "plain.npz", x=rng.random((300, 12), dtype=np.float32))
    ran = command(
        "fit",
        "--config",
        "feddcn_digits",
        "--trainer.max_epochs=2",
        *quick,
        f"--data.init_args.source={tmp_path}/plain.npz",
        "--data.init_args.partition",
        "fedclust.Iid",
        "--data.init_args.partition.n_clients=3",
        "--model.init_args.client.init_args.n_clusters=4",
    )
    assert ran.code == 0, ran.err
    assert not [name for name in ran.csv("metrics.csv")[0] if name.endswith(("/acc", "/nmi", "/ari"))]
    assert not [name for name in ran.json("summary.json")["metrics"] if name.endswith(("/acc", "/nmi", "/ari"))]
    assert "test/dbi" in ran.out
    assert "test/acc" not in ran.out


def test_label_based_monitor_is_an_option_and_is_named(quick_fit):
    ran = quick_fit(
        "--trainer.callbacks+=EarlyStopping",
        "--trainer.callbacks.monitor=val/acc",
        "--trainer.callbacks.mode=max",
        "--trainer.callbacks.patience=1",
        "--trainer.callbacks.min_delta=1.0",
        "--trainer.max_epochs=6",
    )
    assert ran.code == 0, ran.err
    summary = ran.json("summary.json")
    assert (summary["monitor"], summary["monitor_mode"], summary["uses_labels"]) == ("val/acc", "max", True)
    assert (summary["status"], summary["rounds"], len(ran.csv("metrics.csv"))) == ("stopped early", 2, 2)
    assert "uses labels" in ran.out


def test_own_checkpoint_callback_is_kept_beside_ours(quick_fit):
    ran = quick_fit(
        "--trainer.callbacks+=ModelCheckpoint",
        "--trainer.callbacks.save_top_k=-1",
        "--trainer.callbacks.filename={epoch}",
    )
    assert ran.code == 0, ran.err
    names = {path.name for path in (ran.path / "checkpoints").iterdir()}
    assert names == {"start.ckpt", "best.ckpt", "last.ckpt", "epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"}


@pytest.mark.parametrize("logger", ["CSVLogger", "true"])
def test_loggers_write_into_the_run_directory(quick_fit, logger):
    ran = quick_fit("--trainer.logger", logger, "--trainer.max_epochs=1")
    assert ran.code == 0, ran.err
    assert list((ran.path / "lightning_logs" / "version_0").iterdir())
    assert len(ran.csv("metrics.csv")) == 1


def test_central_run_of_the_same_module(command):
    fitted = command(
        "fit",
        "--config",
        "dcn_digits_centralised",
        "--trainer.max_epochs=3",
        "--model.init_args.pretrain_epochs=1",
        "--model.init_args.geometry_weight=0",
    )
    assert fitted.code == 0, fitted.err
    assert len(fitted.csv("metrics.csv")) == 3
    summary = fitted.json("summary.json")
    assert (summary["method"], summary["status"], summary["bytes"]) == ("DCN", "completed", {})
    best = str(fitted.path / "checkpoints" / "best.ckpt")
    tested = command("test", "--ckpt_path", best)
    assert tested.json("summary.json")["metrics"]["test/acc"] == pytest.approx(summary["metrics"]["test/acc"])
    predicted = command("predict", "--ckpt_path", best)
    assert sorted(int(row["row"]) for row in predicted.csv("predictions.csv")) == list(range(1797))


def test_runs_in_a_worker_thread(quick_fit):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        ran = pool.submit(quick_fit, "--trainer.max_epochs=1").result(timeout=120)
    assert ran.code == 0, ran.err


def test_one_client_twenty_clients_and_partial_cohorts(quick_fit):
    partition = "--data.init_args.partition.init_args."
    for n in (1, 20):
        ran = quick_fit(
            f"{partition}n_clients={n}", f"{partition}min_size=12", f"{partition}alpha=1000", "--trainer.max_epochs=1"
        )
        assert ran.code == 0, ran.err
        assert len(ran.csv("clients.csv")) == n
    half = quick_fit("--model.init_args.participation=0.5", f"{partition}n_clients=3")
    assert [row["clients/asked"] for row in half.csv("metrics.csv")] == ["2.0"] * 3
