"""Helpers for tests of the command: one call per command, inside this process."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedclust.cli import main

ALGORITHM = "--model.init_args.algorithm.init_args."
CLIENT = "--model.init_args.client.init_args."
QUICK = (
    *(f"{ALGORITHM}{name}" for name in ("pretrain_epochs=1", "cluster_epochs=1", "round_epochs=1", "n_synthetic=100")),
    *(f"{ALGORITHM}{name}" for name in ("geometry_pretrain=0", "geometry_federated=0")),
    f"{CLIENT}hidden_dims=[16]",
    f"{CLIENT}latent_dim=3",
)


@dataclass(frozen=True)
class Ran:
    """What a command left: exit code, output, and its run directory if it has one."""

    code: int
    out: str
    err: str

    @property
    def path(self) -> Path:
        last = self.out.rstrip("\n").splitlines()[-1]
        assert last.startswith("run: "), self.out + self.err
        return Path(last.removeprefix("run: "))

    def json(self, name: str) -> Any:
        return json.loads((self.path / name).read_text(), parse_constant=_refuse)

    def csv(self, name: str) -> list[dict[str, str]]:
        with (self.path / name).open(newline="") as file:
            return list(csv.DictReader(file))


def _refuse(token: str) -> float:
    raise AssertionError(f"{token} is no JSON")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `fedclust …` in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCLUST_DATA", raising=False)
    monkeypatch.delenv("FEDCLUST_DEBUG", raising=False)
    monkeypatch.setenv("FEDCLUST_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str) -> Ran:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def quick_fit(command: Callable[..., Ran]) -> Callable[..., Ran]:
    """Runs `fedclust fit --config feddcn_digits` with tiny stages; further arguments come last."""

    def run(*arguments: str, config: str = "feddcn_digits") -> Ran:
        return command("fit", "--config", config, "--trainer.max_epochs=3", *QUICK, *arguments)

    return run


@pytest.fixture
def client_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes a Python module that `class_path` can name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    return write


@pytest.fixture
def quick() -> tuple[str, ...]:
    """Arguments that make FedDCN's stages tiny."""
    return QUICK


@pytest.fixture
def idx_root(tmp_path: Path) -> Callable[[str], Path]:
    """Writes gzipped IDX files of random 28 x 28 images in torchvision's layout."""
    return lambda folder: _write_idx(tmp_path / "data", folder)


def _write_idx(root: Path, folder: str, n_train: int = 600, n_test: int = 60) -> Path:
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for part, n in (("train", n_train), ("t10k", n_test)):
        labels = (np.arange(n) % 10).astype(np.uint8)
        images = rng.integers(0, 60, (n, 28, 28), dtype=np.uint8)
        images[np.arange(n), labels] = 255
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, values.ndim]) + b"".join(int(size).to_bytes(4, "big") for size in values.shape)
            (raw / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + values.tobytes(), 1))
    return root


@pytest.fixture
def cifar10_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Writes CIFAR-10's files with so many random images in each of the six; checksums are passed over."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)

    def write(n: int) -> Path:
        folder = tmp_path / "cifar" / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        rng = np.random.default_rng(0)
        for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
            images = rng.integers(0, 256, size=(n, 3072), dtype=np.uint8)
            (folder / name).write_bytes(pickle.dumps({"data": images, "labels": [row % 10 for row in range(n)]}))
        (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {k}" for k in range(10)]}))
        return folder.parent

    return write


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[[], Path]:
    """Writes images/<client>/<class>/<number>.png: three clients with two classes of twelve random images each."""

    def write() -> Path:
        rng = np.random.default_rng(0)
        for client in ("north", "south", "west"):
            for label in ("cat", "dog"):
                folder = tmp_path / "images" / client / label
                folder.mkdir(parents=True)
                for number in range(12):
                    pixels = rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")
        return tmp_path / "images"

    return write
