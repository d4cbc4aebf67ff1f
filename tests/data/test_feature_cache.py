"""The cache of features: hits, keys, damage, writers at the same time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedclust import Encoded
from fedclust.data.feature_cache import FeatureCache, feature_key
from lightning_modules.encoders import RandomKaimingEncoder


class Counting:
    """Mean and maximum of every image, times `weight`; counts the images that it sees."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight, self.seen = weight, 0

    @property
    def fingerprint(self) -> str:
        return f"counting/{self.weight}"

    def encode(self, x: Any) -> Tensor:
        self.seen += len(x)
        flat = x.flatten(1)
        return self.weight * torch.stack([flat.mean(1), flat.amax(1)], dim=1)


def _arrays(n: int = 12, n_test: int = 5, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n + n_test, 4, 4), dtype=np.uint8)
    y = np.arange(n + n_test) % 2
    return x[:n], y[:n], x[n:], y[n:]


def test_a_second_load_encodes_nothing_and_gives_the_same_bits(tmp_path):
    encoder = Counting()
    first = Encoded(_arrays(), encoder, cache_dir=tmp_path).load(scale="none")
    assert encoder.seen == 17
    assert len(list(tmp_path.iterdir())) == 2  # train and test, no temporary files
    again = Encoded(_arrays(), encoder, cache_dir=str(tmp_path)).load(scale="none")
    assert encoder.seen == 17
    assert torch.equal(again.train.x, first.train.x)
    assert again.test is not None
    assert first.test is not None
    assert torch.equal(again.test.x, first.test.x)
    x = torch.from_numpy(_arrays()[0]).float() / 255
    torch.testing.assert_close(first.train.x[:, 1], x.flatten(1).amax(1))


def test_other_weights_or_other_rows_are_other_features(tmp_path):
    Encoded(_arrays(), Counting(), cache_dir=tmp_path).load(scale="none")
    heavier = Counting(2.0)
    double = Encoded(_arrays(), heavier, cache_dir=tmp_path).load(scale="none")
    assert heavier.seen == 17
    x = torch.from_numpy(_arrays()[0]).float() / 255
    torch.testing.assert_close(double.train.x[:, 0], 2 * x.flatten(1).mean(1))
    x_train, y, x_test, y_test = _arrays()
    x_train[3, 0, 0] ^= 1
    changed = Counting()
    Encoded((x_train, y, x_test, y_test), changed, cache_dir=tmp_path).load(scale="none")
    assert changed.seen == 12  # the test rows are the same
    rows = torch.zeros(2, 3)
    keys = {
        feature_key(rows, "a"), feature_key(rows, "b"), feature_key(rows.view(3, 2), "a"), feature_key(rows + 1, "a")
    }  # fmt: skip
    assert len(keys) == 4


def test_real_encoders_with_other_seeds_have_other_files(tmp_path):
    for seed in (0, 1):
        Encoded(_arrays(), RandomKaimingEncoder(seed, size=4, feature_dim=3), cache_dir=tmp_path).load(scale="none")
    assert len(list(tmp_path.iterdir())) == 4


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def _forge(path: Path) -> None:
    """A whole archive with wrong features: its checksums are right, its digest is not."""
    with np.load(path) as archive:
        features, digest = archive["features"], archive["digest"]
    with path.open("wb") as file:
        np.savez(file, features=features + 1, digest=digest)


@pytest.mark.parametrize(
    "damage",
    [_truncate, _flip, _forge, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"PK\x03\x04")],
)
def test_damage_is_noticed_and_repaired(tmp_path, damage):
    encoder = Counting()
    first = Encoded(_arrays(), encoder, cache_dir=tmp_path).load(scale="none")
    for path in tmp_path.iterdir():
        damage(path)
    with pytest.warns(UserWarning, match=r"features-\w+\.npz are damaged .* made anew"):
        again = Encoded(_arrays(), encoder, cache_dir=tmp_path).load(scale="none")
    assert encoder.seen == 34
    assert torch.equal(again.train.x, first.train.x)
    Encoded(_arrays(), encoder, cache_dir=tmp_path).load(scale="none")
    assert encoder.seen == 34


@pytest.mark.filterwarnings("ignore:the cached features")
def test_no_flipped_bit_ends_a_run_or_changes_features(tmp_path):
    cache, features = FeatureCache(tmp_path), torch.arange(6.0).reshape(2, 3)
    cache.put("key", features)
    path = cache.path("key")
    assert path is not None
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in (0, 3, 5, 7):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            found = cache.get("key")
            assert found is None or torch.equal(found, features)


def test_a_file_under_the_name_of_another_key_counts_as_damaged(tmp_path):
    cache = FeatureCache(tmp_path)
    cache.put("a", torch.ones(2, 2))
    (tmp_path / "features-a.npz").rename(tmp_path / "features-b.npz")
    with pytest.warns(UserWarning, match="does not match its digest"):
        assert cache.get("b") is None
    assert cache.get("a") is None


def _write_again_and_again(directory: str, value: float) -> None:
    cache = FeatureCache(directory)
    for _ in range(15):
        cache.put("key", torch.full((200, 50), value))


@pytest.mark.filterwarnings("error::UserWarning")
def test_processes_that_write_at_once_leave_a_whole_file(tmp_path):
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write_again_and_again, args=(str(tmp_path), float(value))) for value in (1, 2)]
    for writer in writers:
        writer.start()
    cache, seen = FeatureCache(tmp_path), set()
    while any(writer.is_alive() for writer in writers):
        found = cache.get("key")  # a damaged file would warn, and a warning is an error here
        if found is not None:
            assert found.shape == (200, 50)
            assert found.min() == found.max()
            seen.add(float(found[0, 0]))
    assert all(writer.exitcode == 0 for writer in writers)
    assert seen <= {1.0, 2.0}
    assert cache.get("key") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["features-key.npz"]


def test_a_writer_that_dies_leaves_the_old_file(tmp_path, monkeypatch):
    cache = FeatureCache(tmp_path)
    cache.put("key", torch.zeros(3, 2))

    def dies(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", dies)
    with pytest.raises(KeyboardInterrupt):
        cache.put("key", torch.ones(3, 2))
    kept = cache.get("key")
    assert kept is not None
    assert not kept.any()
    assert len(list(tmp_path.iterdir())) == 1


def test_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDCLUST_CACHE", raising=False)
    assert FeatureCache().directory == tmp_path / ".cache" / "fedclust"
    monkeypatch.setenv("FEDCLUST_CACHE", str(tmp_path / "own"))
    encoder = Counting()
    Encoded(_arrays(), encoder).load(scale="none")
    assert len(list((tmp_path / "own").iterdir())) == 2
    for _ in range(2):
        Encoded(_arrays(), encoder, cache_dir=None).load(scale="none")
    assert encoder.seen == 3 * 17
    assert {path.name for path in tmp_path.iterdir()} == {"own"}


def test_a_directory_that_takes_no_files_costs_a_warning_only(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="features could not be kept in"):
        source = Encoded(_arrays(), Counting(), cache_dir=tmp_path / "file" / "below").load(scale="none")
    assert len(source.train) == 12
