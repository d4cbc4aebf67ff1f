"""What a fourth reader of the library stumbled over, each with the right answer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from damage import flip_a_bit

import fedclust
import lightning_modules
from fedclust.clustering.kmeans import assign, kmeans, torch_kmeans
from fedclust.data.content import content_sums, same_content
from fedclust.data.tables import Source, Table
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
    np.testing.assert_array_equal(result.predict(x.float().numpy().astype(object)), result.predict(x))
    with pytest.raises(ValueError, match="x must hold real numbers: could not convert string to float"):
        result.predict(np.array([["a", 1, 2, 3]], dtype=object))
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
    flip_a_bit(path)
    with pytest.raises(ValueError, match=r"result\.pt is damaged .* of its part"):
        fedclust.load(path)
    torch.save({"fedclust": {"format": 1}}, path)
    with pytest.raises(ValueError, match=r"result\.pt, or a file of its run, is damaged: KeyError"):
        fedclust.load(path)
    with pytest.raises(ValueError, match=r"there is no directory .*nowhere"):
        small(blobs()).save(tmp_path / "nowhere" / "result.pt")


def test_parts_in_the_wrong_places_are_told() -> None:
    data, module = blobs(), lightning_modules.DCN(n_clusters=2)
    with pytest.raises(TypeError, match="algorithm must be an instance of Algorithm, not of DCN"):
        fedclust.federate(module, fedclust.FedDCN(), data)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="algorithm must be an instance of Algorithm, not the class FedDCN"):
        fedclust.federate(fedclust.FedDCN, module, data)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"client must be in 0\.\.1, got '1'"):
        data.client("1")  # type: ignore[arg-type]


def test_a_monitor_needs_validation_rows() -> None:
    with pytest.raises(ValueError, match="monitor 'val/dbi' needs validation rows; val_fraction is 0"):
        small(blobs(val_fraction=0.0), monitor="val/dbi")


def test_the_last_round_keeps_its_metrics_where_nothing_is_validated(tmp_path: Path) -> None:
    result = small(blobs(val_fraction=0.0), directory=tmp_path / "run")
    assert fedclust.load(tmp_path / "run" / "checkpoints" / "selected.ckpt").metrics == result.metrics != {}


def test_rows_that_are_not_finite_stay_the_same_rows() -> None:
    x = torch.rand(80, 4, generator=torch.Generator().manual_seed(0))
    source = Source("holes", Table(x, None, np.arange(80)), None)
    source.train.x[3, 1] = torch.nan

    class Filled(lightning_modules.DCN):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return super().encode(x.nan_to_num())

        def terms(self, batch: Any, *arguments: Any, **more: Any) -> Any:
            return super().terms({**batch, "x": batch["x"].nan_to_num()}, *arguments, **more)

    data = fedclust.FederatedDataModule(source, fedclust.Iid(2), seed=0)
    module = Filled(n_clusters=2, hidden_dims=[4], latent_dim=2)
    assert fedclust.federate(fedclust.FedDCN(**QUICK), module, data, rounds=1, progress=False).metrics


def test_a_central_run_on_other_loaders_can_be_saved(tmp_path: Path) -> None:
    data = blobs()
    module = lightning_modules.DCN(n_clusters=2, hidden_dims=[4], latent_dim=2, geometry_weight=0.0, pretrain_epochs=0)
    module.build((4,), None)
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    trainer.test(module, dataloaders=data.test_dataloader(), verbose=False)
    trainer.save_checkpoint(tmp_path / "central.ckpt")
    assert (tmp_path / "central.ckpt").is_file()


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
    changed[7, 3] += 1 / 255
    other_label = y.clone()
    other_label[5] = (other_label[5] + 1) % 3
    up = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    assert same_content(own[0], sums(torch.where(up, torch.nextafter(x, x + 1), torch.nextafter(x, x - 1)), y))
    assert not same_content(own[0], sums(x, other_label))
    missing = x.clone()
    missing[0, 0] = torch.nan
    assert same_content(sums(missing, y)[0], sums(missing, y))
    assert not same_content(own[0], sums(changed, y))
    assert not same_content(own[0], sums(x[order], y[order]))
    assert not same_content(own[0], sums(x[:, [1, 0, 2, 3, 4, 5]], y))
    assert not same_content(own[0], sums(x, y.flip(0)))
    assert not same_content(own[0], sums(x[:, :5], y))
