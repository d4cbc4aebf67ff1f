"""Readers and the places they look in; all files are tiny and written by the test, no network."""

from __future__ import annotations

import bz2
import gzip
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedclust.data.files import read_idx
from fedclust.data.sources import load_source

WriteIdx = Callable[..., dict[str, np.ndarray]]


def test_digits() -> None:
    source = load_source("digits")
    assert source.test is not None
    assert (len(source.train), len(source.test)) == (1438, 359)
    assert source.train.x.shape[1:] == (1, 8, 8)
    assert float(source.train.x.min()) == 0.0
    assert float(source.train.x.max()) == 1.0
    assert source.class_names == [str(digit) for digit in range(10)]
    assert source.test.y is not None
    assert set(torch.bincount(source.test.y).tolist()) <= {35, 36, 37}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw")])
def test_idx_sources(tmp_path: Path, write_idx_set: WriteIdx, name: str, folder: str, zipped: bool) -> None:
    arrays = write_idx_set(tmp_path / folder, zipped=zipped)
    source = load_source(name, root=tmp_path)
    expected = torch.from_numpy(arrays["train-images-idx3-ubyte"].astype(np.float32)) / 255
    assert torch.equal(source.train.x, expected[:, None])
    assert source.test is not None
    assert len(source.test) == 20
    assert source.train.y is not None
    assert source.train.y.tolist() == arrays["train-labels-idx1-ubyte"].tolist()
    assert not source.one_table


@pytest.mark.parametrize("folder", ["raw", "."])
def test_root_may_be_the_folder_itself(tmp_path: Path, write_idx_set: WriteIdx, folder: str) -> None:
    write_idx_set(tmp_path / folder, zipped=True)
    assert len(load_source("fashion_mnist", root=tmp_path).train) == 40


def test_places_without_root(tmp_path: Path, write_idx_set: WriteIdx, monkeypatch: pytest.MonkeyPatch) -> None:
    write_idx_set(tmp_path / "data" / "MNIST" / "raw", zipped=True, n=30)
    write_idx_set(tmp_path / "elsewhere" / "MNIST" / "raw", zipped=True, n=50)
    write_idx_set(tmp_path / "system", zipped=True, n=60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCLUST_DATA", raising=False)
    assert len(load_source("mnist").train) == 30
    monkeypatch.setenv("FEDCLUST_DATA", str(tmp_path / "elsewhere"))
    assert len(load_source("mnist").train) == 50
    monkeypatch.setitem(load_source.__globals__["_SYSTEM_FOLDERS"], "fashion_mnist", str(tmp_path / "system"))
    assert len(load_source("fashion_mnist").train) == 60


@pytest.mark.parametrize(
    ("name", "files", "dataset"),
    [
        ("mnist", "train-images-idx3-ubyte", "MNIST"),
        ("fashion_mnist", "t10k-labels-idx1-ubyte", "FashionMNIST"),
        ("usps", "usps.t.bz2", "USPS"),
        ("cifar10", "data_batch_5", "CIFAR10"),
    ],
)
def test_missing_files_say_where_what_and_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: str, dataset: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDCLUST_DATA", str(tmp_path / "env"))
    with pytest.raises(FileNotFoundError) as caught:
        load_source(name)
    message = str(caught.value)
    for needed in (str(tmp_path / "env"), str(tmp_path / "data"), files, f"import {dataset}", "download=True"):
        assert needed in message
    assert ("/usr/share/datasets/fashion-mnist" in message) == (name == "fashion_mnist")
    with pytest.raises(FileNotFoundError) as caught:
        load_source(name, root=tmp_path / "own")
    assert str(tmp_path / "env") not in str(caught.value)


def test_damaged_idx_files_are_named(tmp_path: Path, write_idx_set: WriteIdx) -> None:
    write_idx_set(tmp_path, zipped=False)
    whole = (tmp_path / "train-images-idx3-ubyte").read_bytes()
    for content in (whole[:-1], whole[:9], b"", b"hello, no images here", whole[:2] + b"\x0d" + whole[3:]):
        plain, zipped = tmp_path / "plain", tmp_path / "zipped.gz"
        plain.write_bytes(content)
        zipped.write_bytes(gzip.compress(content))
        for path in (plain, zipped):
            with pytest.raises(ValueError, match=f"{path.name} is not a complete IDX file"):
                read_idx(path)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(ValueError, match=r"cut\.gz is not a complete IDX file"):
        read_idx(tmp_path / "cut.gz")


def test_usps_through_torchvision(tmp_path: Path) -> None:
    pixels = " ".join(f"{number}:{-1 + 2 * (number % 2)}" for number in range(1, 257))
    for file, n in (("usps.bz2", 6), ("usps.t.bz2", 4)):
        (tmp_path / file).write_bytes(bz2.compress("".join(f"{k % 3 + 1} {pixels}\n" for k in range(n)).encode()))
    source = load_source("usps", root=tmp_path)
    assert source.train.x.shape == (6, 1, 16, 16)
    assert source.train.x[0, 0, 0, :4].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert source.test is not None
    assert len(source.test) == 4
    assert source.class_names == ["0", "1", "2"]


def _write_cifar(folder: Path) -> np.ndarray:
    folder.mkdir(parents=True)
    data = np.random.default_rng(0).integers(0, 256, size=(2, 3072), dtype=np.uint8)
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [0, 9]}))
    names = [f"class {k}" for k in range(10)]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    return data


def test_cifar10_through_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = _write_cifar(tmp_path / "cifar-10-batches-py")
    with pytest.raises(ValueError, match=r"cifar10: the files in .* are damaged"):
        load_source("cifar10", root=tmp_path)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    source = load_source("cifar10", root=tmp_path)
    assert source.train.x.shape == (10, 3, 32, 32)
    assert torch.equal(source.train.x[1], torch.from_numpy(data[1].reshape(3, 32, 32)) / 255)
    assert source.class_names == [f"class {k}" for k in range(10)]
    assert source.train.y is not None
    assert source.train.y.tolist() == [0, 9] * 5


def test_npz(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((20, 4))
    y = np.array(["b", "a"] * 10)
    np.savez(tmp_path / "one.npz", x=x, y=y, ids=np.array(["north", "south"] * 10))
    source = load_source(str(tmp_path / "one.npz"))
    assert source.name == "one"
    assert source.class_names == ["a", "b"]
    assert source.ids is not None
    assert set(source.ids) == {"north", "south"}
    np.savez(tmp_path / "two.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    two = load_source(tmp_path / "two.npz")
    assert two.test is not None
    assert (len(two.train), len(two.test)) == (20, 5)
    np.savez(tmp_path / "bare.npz", x=x)
    assert load_source(tmp_path / "bare.npz").train.y is None


def test_bad_npz_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        load_source(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"is not an \.npz of plain"):
        load_source(tmp_path / "text.npz")
    np.savez(tmp_path / "objects.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match=r"is not an \.npz of plain"):
        load_source(tmp_path / "objects.npz")
    np.savez(tmp_path / "names.npz", images=np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"holds \['images'\]; allowed are x, y, ids"):
        load_source(tmp_path / "names.npz")


def _write_image(path: Path, level: int, size: int = 4) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, 3), level, dtype=np.uint8)).save(path)


def test_image_folder_of_classes(tmp_path: Path) -> None:
    for number in range(5):
        _write_image(tmp_path / "cat" / f"{number}.png", 51)
        _write_image(tmp_path / "dog" / f"{number}.png", 255)
    source = load_source(str(tmp_path), image_channels=1)
    assert source.train.x.shape == (8, 1, 4, 4)
    assert source.class_names == ["cat", "dog"]
    assert source.ids is None
    assert source.train.y is not None
    means = source.train.x.mean(dim=(1, 2, 3))
    assert torch.allclose(means, torch.where(source.train.y == 0, 0.2, 1.0))
    by_name = load_source("image_folder", root=tmp_path, image_size=6)
    assert by_name.train.x.shape == (8, 3, 6, 6)


def test_image_folder_of_clients_with_test_part(tmp_path: Path) -> None:
    for part, n in (("train", 3), ("test", 1)):
        for client in ("ward_a", "ward_b"):
            for number in range(n):
                _write_image(tmp_path / part / client / "sick" / f"{number}.png", 10)
        _write_image(tmp_path / part / "ward_b" / "well" / "0.png", 20)
    source = load_source(tmp_path)
    assert source.ids is not None
    assert source.ids.tolist() == ["ward_a"] * 3 + ["ward_b"] * 4
    assert source.test_ids is not None
    assert source.test_ids.tolist() == ["ward_a", "ward_b", "ward_b"]
    assert source.class_names == ["sick", "well"]
    assert not source.one_table


def test_bad_image_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no sub-folders"):
        load_source(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no images"):
        load_source(tmp_path)
    _write_image(tmp_path / "cat" / "0.png", 10, size=4)
    _write_image(tmp_path / "cat" / "1.png", 10, size=5)
    with pytest.raises(ValueError, match=r"has size \(4, 4\) but .* has \(5, 5\): give image_size"):
        load_source(tmp_path)
    with pytest.raises(ValueError, match="needs root"):
        load_source("image_folder")
    with pytest.raises(ValueError, match="image_channels must be 1 or 3, got 2"):
        load_source(tmp_path, image_channels=2)
    with pytest.raises(ValueError, match="image_size must be"):
        load_source(tmp_path, image_size=0)
    with pytest.raises(FileNotFoundError, match="no folder"):
        load_source("image_folder", root=tmp_path / "none")
    _write_image(tmp_path / "half" / "test" / "cat" / "0.png", 10)
    with pytest.raises(FileNotFoundError, match="test/ but no train/"):
        load_source(tmp_path / "half")


def test_list_of_arrays_one_per_client() -> None:
    rng = np.random.default_rng(0)
    source = load_source([rng.random((10, 3)), torch.rand(20, 3).double().numpy()])
    assert source.ids is not None
    assert np.bincount(source.ids).tolist() == [8, 16]
    assert source.test_ids is not None
    assert np.bincount(source.test_ids).tolist() == [2, 4]
    labelled = load_source([(rng.random((10, 3)), ["a"] * 10), (rng.random((10, 3)), ["b"] * 10)])
    assert labelled.class_names == ["a", "b"]


def test_bad_lists_name_the_client() -> None:
    good = np.zeros((3, 2))
    for second, message in (
        (np.zeros((3, 4)), r"client 1: rows are float64 \(4,\), those of client 0 float64 \(2,\)"),
        (np.zeros((0, 2)), "client 1: x must have shape"),
        ((good, np.zeros(3)), "client 1: give labels for all clients or for none"),
        ("x", "client 1: x must be a numpy array"),
        ((good, good, good), "client 1: an entry must be an array or"),
    ):
        with pytest.raises(ValueError, match=message):
            load_source([good, second])
    with pytest.raises(ValueError, match=r"client 1: labels of shape \(2,\) for 3 rows"):
        load_source([(good, np.zeros(3)), (good, np.zeros(2))])
    with pytest.raises(ValueError, match="empty list"):
        load_source([])


def test_unknown_sources_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'mnits' is neither a known name \(digits, mnist"):
        load_source("mnits")
    with pytest.raises(ValueError, match="source x must be a numpy array or torch tensor, got int"):
        load_source(3)
    with pytest.raises(ValueError, match="got 3 entries"):
        load_source((np.zeros((2, 2)),) * 3)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_real_files(real_data_root: Path, name: str) -> None:
    source = load_source(name, root=real_data_root)
    assert source.test is not None
    assert source.train.x.shape == (60000, 1, 28, 28)
    assert source.test.x.shape == (10000, 1, 28, 28)
    assert float(source.train.x.max()) == 1.0
    assert float(source.train.x.mean()) == pytest.approx({"mnist": 0.1307, "fashion_mnist": 0.2860}[name], abs=1e-4)
