"""The Python API: federate, results, load, and cluster on plain arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

import fedclust
import lightning_modules
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.tables import Source
from fedclust.report.selection import checkpoint_round

QUICK: dict[str, Any] = {
    "geometry_pretrain": 0.0, "geometry_federated": 0.0, "pretrain_epochs": 3, "cluster_epochs": 1, "round_epochs": 1,
    "n_synthetic": 60,
}  # fmt: skip


@pytest.fixture
def federate(feddcn: Any, dcn: Any, blobs: Any) -> Any:
    """Two quick rounds on the blobs."""

    def run(data: Any = None, rounds: int = 2, *, client: Any = (), **options: Any) -> fedclust.Result:
        data = blobs((40, 30, 35)) if data is None else data
        return fedclust.federate(feddcn(), dcn(**dict(client)), data, rounds, progress=False, **options)

    return run


def test_the_documented_snippet(tmp_path: Any) -> None:
    data = fedclust.FederatedDataModule(source="digits", partition=fedclust.Dirichlet(n_clients=5, alpha=0.5), seed=0)
    result = fedclust.federate(
        fedclust.FedDCN(**QUICK), lightning_modules.DCN(n_clusters=10, hidden_dims=[128], latent_dim=8), data, rounds=2
    )
    assert {"test/acc", "test/nmi", "test/ari", "test/dbi", "test/recon", "test/populated"} <= result.metrics.keys()
    assert 0.1 <= result.metrics["test/acc"] <= 1
    assert [row["round"] for row in result.history] == [1, 2]
    labels = result.predict(data.test.x)
    assert labels.shape == (len(data.test),)
    again = fedclust.load(result.save(tmp_path / "result.pt"))
    assert np.array_equal(again.predict(data.test.x), labels)


def test_metrics_are_those_of_the_predictions(federate: Any, blobs: Any) -> None:
    data = blobs((40, 30, 35))
    result = federate(data)
    labels = result.predict(data.test.x)
    assert labels.dtype == np.int64
    assert result.metrics["test/ari"] == pytest.approx(adjusted_rand_score(data.test.y, labels), abs=1e-6)
    assert result.metrics["test/acc"] == pytest.approx(fedclust.clustering_accuracy(data.test.y, labels))
    z, centers = result.transform(data.test.x), result.module.centers.numpy()
    assert z.shape == (len(data.test), 2)
    full = np.linalg.norm(z[:, None] - centers[None], axis=2)
    assert np.array_equal(full.argmin(1), labels)
    assert np.allclose(result.distances(data.test.x), full.min(1), atol=1e-5)


def test_saved_and_loaded_results_are_equal(federate: Any, blobs: Any, tmp_path: Any) -> None:
    data = blobs((40, 30, 35))
    result = federate(data)
    path = result.save(str(tmp_path / "r.pt"))
    again = fedclust.load(path)
    for field in ("metrics", "history", "notes", "summary"):
        assert getattr(again, field) == getattr(result, field)
    for name, value in result.state.to_flat().items():
        assert torch.equal(again.state.to_flat()[name], value)
    for method in ("predict", "distances", "transform"):
        assert np.array_equal(getattr(again, method)(data.test.x), getattr(result, method)(data.test.x))
    assert fedclust.load(again.save(tmp_path / "twice.pt")).metrics == result.metrics


def test_the_best_round_by_the_monitor_is_the_result(federate: Any, tmp_path: Any) -> None:
    result = federate(rounds=4, directory=tmp_path / "run")
    best = min(result.history, key=lambda row: row["val/dbi"])["round"]
    assert checkpoint_round(tmp_path / "run" / "checkpoints" / "best.ckpt") == best
    loaded = fedclust.load(tmp_path / "run")
    assert torch.equal(loaded.state.centers, result.state.centers)
    other = federate(rounds=4, monitor="val/recon", mode="max")
    worst = max(other.history, key=lambda row: row["val/recon"])["round"]
    assert other.summary["selected_round"] == worst


def test_runs_are_functions_of_the_data_s_seed(federate: Any, blobs: Any) -> None:
    results = [federate(blobs((40, 30, 35), seed=seed)) for seed in (0, 0, 1)]
    states = [torch.cat([v.flatten().double() for v in r.state.to_flat().values()]) for r in results]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    unseeded = FederatedDataModule([(np.eye(6, dtype=np.float32).repeat(6, 0))] * 2)
    assert unseeded.resolved_seed == 0


def test_patience_stops_early(federate: Any) -> None:
    result = federate(rounds=40, patience=1)
    assert len(result.history) < 40
    assert result.summary["status"] == "stopped early"


def test_without_test_rows_the_metrics_are_the_validation_s(federate: Any, blobs: Any) -> None:
    result = federate(blobs(test_fraction=0.0))
    assert result.metrics["val/dbi"] == min(row["val/dbi"] for row in result.history)
    assert all(name.startswith("val/") for name in result.metrics)
    assert result.collapsed is bool(result.metrics["val/collapsed"])


def test_without_validation_rows_the_last_round_is_taken(federate: Any, blobs: Any, tmp_path: Any) -> None:
    data = blobs(val_fraction=0.0)
    result = federate(data, directory=tmp_path / "run")
    assert "test/dbi" in result.metrics
    assert result.summary["selected"] == "last"
    assert np.array_equal(fedclust.load(tmp_path / "run").predict(data.test.x), result.predict(data.test.x))
    with pytest.raises(ValueError, match=r"patience needs validation rows"):
        federate(data, patience=2)
    bare = federate(blobs(val_fraction=0.0, test_fraction=0.0))
    assert bare.metrics == {}
    assert len(bare.predict(data.train.x)) == len(data.train)


def test_without_labels(federate: Any, blobs: Any) -> None:
    result = federate(blobs(labels=False))
    assert not {"test/acc", "test/nmi", "test/ari"} & result.metrics.keys()
    assert math.isfinite(result.metrics["test/recon"])


def test_a_collapsed_result_says_so(federate: Any) -> None:
    result = federate()
    assert not result.collapsed or result.metrics["test/collapsed"] == 1.0
    result.metrics["test/collapsed"] = 1.0
    assert result.collapsed


@pytest.mark.parametrize("rounds", [0, -1, True, 1.5, "3"])
def test_bad_rounds(federate: Any, rounds: Any) -> None:
    with pytest.raises(ValueError, match=r"rounds must be a positive integer"):
        federate(rounds=rounds)


def test_bad_precision(federate: Any) -> None:
    with pytest.raises(ValueError, match=r"64-true"):
        federate(precision="64-true")


# -- inputs of predict ---------------------------------------------------------------------------------------------


def image_result(federate: Any, x: np.ndarray, **options: Any) -> tuple[fedclust.Result, FederatedDataModule]:
    data = FederatedDataModule((x,), fedclust.Iid(2), seed=0, **options)
    return federate(data, 1, client={"output": "linear"}), data


def test_equivalent_inputs_give_equal_predictions(federate: Any) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (60, 4, 5), dtype=np.uint8)
    result, data = image_result(federate, raw)
    assert data.input_shape == (1, 4, 5)
    expected = result.transform(raw)
    scaled = (raw / 255).astype(np.float32)
    for x in (
        raw[:, None],
        raw.reshape(60, 20),
        scaled,
        scaled.reshape(60, 20),
        scaled.tolist(),
        torch.from_numpy(raw),
    ):
        assert np.allclose(result.transform(x), expected, atol=1e-6)
    everything = torch.cat([getattr(data, split).x for split in ("train", "val", "test")])
    rows = np.concatenate([getattr(data, split).rows for split in ("train", "val", "test")])
    assert np.allclose(result.transform(everything), expected[rows], atol=1e-6)
    assert len(result.predict(raw[:0])) == 0


@pytest.mark.parametrize("scale", ["minmax", "standard"])
def test_the_fitted_scaling_is_applied_in_predict_and_survives_saving(federate: Any, tmp_path: Any, scale: str) -> None:
    raw = 100 + 50 * np.random.default_rng(0).random((60, 6))
    result, data = image_result(federate, raw, scale=scale)
    for loaded in (result, fedclust.load(result.save(tmp_path / "r.pt"))):
        assert np.allclose(loaded.transform(raw[data.train.rows]), result.module.latents(data.train.x), atol=1e-5)
    assert not np.allclose(
        result.transform(raw[:5]), result.module.latents(torch.from_numpy(raw[:5]).float()), atol=1e-2
    )


def test_raw_bytes_stay_raw_where_no_scaling_was_asked_for(federate: Any) -> None:
    raw = np.random.default_rng(0).integers(0, 256, (60, 6), dtype=np.uint8)
    result, data = image_result(federate, raw, scale="none")
    assert float(data.train.x.max()) > 200
    assert np.allclose(result.transform(raw[data.train.rows]), result.module.latents(data.train.x), rtol=1e-4)


def test_wrong_inputs_are_refused(federate: Any) -> None:
    result, _ = image_result(federate, np.random.default_rng(0).random((60, 2, 4, 3)).astype(np.float32))
    shape = result.entry["input_shape"]
    assert shape == [3, 2, 4]
    for bad in (np.zeros((5, 23)), np.zeros(24), np.zeros((5, 4, 2, 3)), np.zeros((5, 4, 6)), 3.0):
        with pytest.raises(ValueError, match=r"x must have shape \(n, 3, 2, 4\) or \(n, 24\)"):
            result.predict(bad)
    x = np.zeros((4, 24))
    x[2, 3], x[3, 0] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"2 rows of x hold NaN or infinite values, first row 2"):
        result.predict(x)


# -- load ------------------------------------------------------------------------------------------------------------


def test_files_that_are_no_results_are_refused(tmp_path: Any, federate: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file"):
        fedclust.load(tmp_path / "nothing.pt")
    with pytest.raises(FileNotFoundError, match=r"no checkpoint"):
        fedclust.load(tmp_path)
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.pt").write_bytes(b"")
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    for name in ("text", "empty", "other", "tensor"):
        with pytest.raises(ValueError, match=f"{name}.pt"):
            fedclust.load(tmp_path / f"{name}.pt")
    saved = torch.load(federate().save(tmp_path / "good.pt"), weights_only=True)
    saved["fedclust"]["format"] = 99
    torch.save(saved, tmp_path / "newer.pt")
    with pytest.raises(ValueError, match=r"format 99"):
        fedclust.load(tmp_path / "newer.pt")
    saved["fedclust"] |= {"format": 1, "client": "subprocess.Popen"}
    torch.save(saved, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"subprocess.Popen is no ClientModule"):
        fedclust.load(tmp_path / "evil.pt")


def test_a_source_object_works_too(federate: Any, blobs: Any) -> None:
    data = blobs((40, 30))
    source = Source("mine", data.train, data.test, ["a", "b", "c"])
    result = federate(FederatedDataModule(source, fedclust.Iid(2), seed=0))
    assert result.summary["source"] == "mine"
