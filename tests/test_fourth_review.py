"""What a fourth reader of the library stumbled over, each with the right answer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedclust
import lightning_modules
from fedclust.clustering.kmeans import assign, kmeans, torch_kmeans
from fedclust.data.content import content_sums, same_content
from fedclust.data.tables import Table
from fedclust.metrics import contingency_table, scores_from_contingency
from fedclust.report.recorder import RunRecorder

QUICK: dict[str, Any] = {
    "geometry_pretrain": 0.0, "geometry_federated": 0.0, "pretrain_epochs": 1, "cluster_epochs": 1, "round_epochs": 1,
    "n_synthetic": 60,
}  # fmt: skip


def small(data: fedclust.FederatedDataModule, **settings: Any) -> fedclust.Result:
    module = lightning_modules.DCN(n_clusters=2, hidden_dims=[4], latent_dim=2)
    return fedclust.federate(fedclust.FedDCN(**QUICK), module, data, rounds=2, progress=False, **settings)


def blobs(shape: tuple[int, ...] = (4,), **settings: Any) -> fedclust.FederatedDataModule:
    rng = np.random.default_rng(0)
    arrays = [rng.random((40, *shape)).astype(np.float32) for _ in range(2)]
    return fedclust.FederatedDataModule(arrays, seed=0, **settings)


def test_rows_that_are_not_scaled_as_those_of_training_are_told() -> None:
    from sklearn.datasets import load_digits

    data = fedclust.FederatedDataModule("digits", seed=0)
    result = small(data)
    raw = load_digits().images[data.test.rows]
    with pytest.warns(UserWarning, match="x runs from 0 to 16, the training rows from 0 to 1: scale x as they were"):
        result.predict(raw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(result.predict(raw / 16), result.predict(data.test))
        result.predict(raw / 16 * 1.5)


def test_images_with_the_channels_last_are_brought_into_order() -> None:
    result = small(blobs((2, 4, 5)))
    x = np.random.default_rng(1).random((6, 2, 4, 5)).astype(np.float32)
    np.testing.assert_array_equal(result.transform(np.moveaxis(x, 1, 3)), result.transform(x))


def test_types_of_rows_from_outside() -> None:
    result = small(blobs())
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    np.testing.assert_array_equal(result.predict(x), result.predict(x.float().numpy()))
    with pytest.raises(ValueError, match="x must hold real numbers, not complex64"):
        result.predict(x.to(torch.complex64))


def test_a_checkpoint_brings_the_metrics_of_its_own_round(tmp_path: Path) -> None:
    result = small(blobs(), directory=tmp_path / "run")
    selected = int(result.summary["selected_round"])
    checkpoints = tmp_path / "run" / "checkpoints"
    assert fedclust.load(tmp_path / "run").metrics == result.metrics
    assert fedclust.load(checkpoints / "start.ckpt").metrics == {}
    last = fedclust.load(checkpoints / "last.ckpt").metrics
    if selected == 2:
        assert last == result.metrics
    else:
        assert last == {name: value for name, value in result.history[1].items() if name.startswith("val/")}


def test_a_damaged_file_is_not_loaded(tmp_path: Path) -> None:
    path = small(blobs()).save(tmp_path / "result.pt")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"result\.pt is damaged: the checksum of its part"):
        fedclust.load(path)
    torch.save({"fedclust": {"format": 1}}, path)
    with pytest.raises(ValueError, match=r"result\.pt, or a file of its run, is damaged: KeyError"):
        fedclust.load(path)
    with pytest.raises(ValueError, match=r"there is no directory .*nowhere"):
        small(blobs()).save(tmp_path / "nowhere" / "result.pt")


def test_parts_in_the_wrong_places_are_told() -> None:
    data, module = blobs(), lightning_modules.DCN(n_clusters=2)
    with pytest.raises(TypeError, match="algorithm must be a Algorithm, not a DCN"):
        fedclust.federate(module, fedclust.FedDCN(), data)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="algorithm must be a Algorithm, not the class FedDCN"):
        fedclust.federate(fedclust.FedDCN, module, data)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"client must be in 0\.\.1, got '1'"):
        data.client("1")  # type: ignore[arg-type]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file' is a file"):
        small(blobs(), directory=tmp_path / "file")


def test_an_error_is_told_even_where_it_cannot_be_recorded(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "gone")
    recorder.started = True
    with pytest.warns(UserWarning, match="the end of the run could not be recorded: FileNotFoundError"):
        recorder.on_exception(None, None, RuntimeError("the cause"))  # type: ignore[arg-type]
    assert recorder.summary["error"] == "RuntimeError: the cause"


@pytest.mark.parametrize("fit", [kmeans, torch_kmeans])
@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_kmeans_of_very_large_and_very_small_rows(fit: Any, size: float) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(0, 0.1, (20, 3)), rng.normal(5, 0.1, (20, 3))])
    result = fit((x * size).astype(np.float32), 2, seed=0)
    assert len(set(result.labels[:20])) == len(set(result.labels[20:])) == 1
    assert result.labels[0] != result.labels[-1]
    np.testing.assert_array_equal(assign((x * size).astype(np.float32), result.centers), result.labels)
    fit(x, 2, seed=2**70)


def test_ids_of_a_pandas_column() -> None:
    ids = np.array(["b", "a", "b"], dtype=object)
    assert [part.tolist() for part in fedclust.Natural(ids).split(None, 0, n_rows=3)] == [[1], [0, 2]]
    with pytest.raises(ValueError, match="ids must be one whole number or string per row"):
        fedclust.Natural(np.array(["b", 1.5], dtype=object))


def test_nmi_is_at_most_one() -> None:
    rng = np.random.default_rng(0)
    for n_classes in range(2, 30):
        labels = np.concatenate([np.arange(n_classes), rng.integers(0, n_classes, 997)])
        assert scores_from_contingency(contingency_table(labels, labels, n_classes, n_classes))["nmi"] <= 1.0


def test_content_tells_values_order_and_labels_but_not_rounding() -> None:
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.random((300, 6)).astype(np.float32)), torch.arange(300) % 3

    def sums(x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        return content_sums([Table(x, y, np.arange(len(x)))])

    own = sums(x, y)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[7, 3] += 0.01
    assert same_content(own, sums(torch.nextafter(x, x + 1), y))
    assert not same_content(own, sums(changed, y))
    assert not same_content(own, sums(x[order], y[order]))
    assert not same_content(own, sums(x[:, [1, 0, 2, 3, 4, 5]], y))
    assert not same_content(own, sums(x, y.flip(0)))
    assert not same_content(own, sums(x[:, :5], y))
