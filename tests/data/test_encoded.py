"""A data source through an encoder: cache, keys, principal components, and its way into the data module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedclust import Dirichlet, Encoded, FederatedDataModule, Iid, LabelSwaps, Rotations
from fedclust.data.encoded import Projection
from fedclust.data.sources import load_source
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


# -- principal components and scaling --------------------------------------------------------------------------------


def test_components_come_from_the_training_rows_alone(tmp_path):
    """Train features lie on a line (a, 2a) + (1, 5); the test ones leave it and must not matter."""

    class Line:
        fingerprint = "line"

        def encode(self, x: Any) -> Tensor:
            a = x[:, 0, 0, 0]
            return torch.stack([1 + a, 5 + 2 * a + x[:, 0, 0, 1]], dim=1)

    x = np.zeros((4, 1, 1, 2), np.float32)
    x[:, 0, 0, 0] = [0.0, 0.2, 0.4, 1.0]  # mean .4
    x_test = np.array([[[[0.4, 1.0]]], [[[1.0, 0.0]]]], np.float32)
    encoded = Encoded((x, None, x_test, None), Line(), n_components=1, cache_dir=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="call load"):
        encoded.features(torch.zeros(1, 1, 1, 2))
    source = encoded.load(scale="none")
    # The unit vector along (1, 2), so row a has the coordinate (a - .4) sqrt(5), and (0, 1) projects to 2 / sqrt(5).
    sign = torch.sign(source.train.x[3, 0])
    expected = (torch.tensor([0.0, 0.2, 0.4, 1.0]) - 0.4) * 5**0.5
    torch.testing.assert_close(sign * source.train.x[:, 0], expected, atol=1e-6, rtol=1e-5)
    assert source.test is not None
    torch.testing.assert_close(sign * source.test.x[:, 0], torch.tensor([2 / 5**0.5, 0.6 * 5**0.5]))
    torch.testing.assert_close(encoded.features(torch.from_numpy(x_test)), source.test.x)


def test_projection_keeps_distances_and_orders_by_variance():
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5, 2, 1, 1, 1])
    found = Projection.fit(x, 6).apply(x)
    torch.testing.assert_close(F.pdist(found), F.pdist(x), atol=1e-4, rtol=1e-4)
    assert torch.equal(found.var(0).argsort(descending=True), torch.arange(6))
    wide = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))  # fewer rows than features
    assert Projection.fit(wide, 4).apply(wide).shape == (5, 4)


@pytest.mark.parametrize("scale", ["standard", "minmax"])
def test_scaling_works_on_the_features(scale):
    data = FederatedDataModule(Encoded(_arrays(), Counting(), cache_dir=None), Iid(2), scale=scale, val_fraction=0.0)
    x = data.train.x.double()
    low, high = (x.mean(0), x.std(0, correction=0)) if scale == "standard" else (x.amin(0), x.amax(0))
    torch.testing.assert_close(low, torch.zeros(2, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(high, torch.ones(2, dtype=torch.float64), atol=1e-6, rtol=0)
    assert data.scaling is not None
    raw = Encoded(_arrays(), Counting(), cache_dir=None).load(scale="none").train
    assert torch.equal(torch.from_numpy(data.scaling.apply(raw.x.numpy()))[data.train.rows], data.train.x)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"encoder must have encode\(x\) and fingerprint.*got 'resnet'"):
        Encoded("digits", "resnet")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"n_components must be .* got 0"):
        Encoded("digits", Counting(), n_components=0)
    with pytest.raises(ValueError, match="n_components must be at most 2, for 12 training rows of 2 features, got 3"):
        Encoded(_arrays(), Counting(), n_components=3, cache_dir=None).load()
    flat = np.zeros((6, 16), np.uint8)
    with pytest.raises(ValueError, match=r"arrays: images must have shape .* got \(5, 16\); flat rows"):
        Encoded((flat,), RandomKaimingEncoder(size=4), cache_dir=tmp_path).load()
    assert not list(tmp_path.iterdir())

    class Short(Counting):
        def encode(self, x: Any) -> Tensor:
            return super().encode(x)[:-1]

    with pytest.raises(
        ValueError, match=r"one float32 row of features per image, 12 in all, got torch.float32 \(11, 2\)"
    ):
        Encoded(_arrays(), Short(), cache_dir=None).load()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Encoded("mnist", Counting(), root="nowhere", cache_dir=None).load()
    with pytest.raises(ValueError, match="Rotations needs images"):
        FederatedDataModule(Encoded(_arrays(), Counting(), cache_dir=None), Iid(2), transform=Rotations()).setup()


def test_features_that_cannot_be_used_are_refused_before_they_are_kept(tmp_path):
    class Broken(Counting):
        def encode(self, x: Any) -> Tensor:
            features = super().encode(x)
            features[3, 1], features[-1, 0] = float("nan"), float("inf")
            return features

    class Uneven(Counting):
        def encode(self, x: Any) -> Tensor:
            return super().encode(x)[:, : len(x) // 512]

    with pytest.raises(ValueError, match=r"arrays: .* NaN or infinite features for 2 of 12 rows, .* row 3$"):
        Encoded(_arrays(), Broken(), cache_dir=tmp_path).load()
    text = r"arrays: the encoder gives 1 features for 600 rows, the first of them row 1024, and 2 for those before"
    with pytest.raises(ValueError, match=text):
        Encoded(_arrays(1624), Uneven(), cache_dir=tmp_path).load()
    assert not list(tmp_path.iterdir())


# -- in the data module ----------------------------------------------------------------------------------------------


def test_digits_through_a_random_encoder(tmp_path):
    encoder = RandomKaimingEncoder(size=8)
    data = FederatedDataModule(Encoded("digits", encoder, cache_dir=tmp_path), Dirichlet(3, 0.5), seed=1, scale="none")
    plain = FederatedDataModule("digits", Dirichlet(3, 0.5), seed=1)
    assert data.input_shape == (84,)
    assert (data.n_clients, data.n_classes, data.n_rows) == (3, 10, plain.n_rows)
    for client in range(3):
        for split in ("train", "val", "test"):
            own, images = getattr(data.client(client), split), getattr(plain.client(client), split)
            assert np.array_equal(own.rows, images.rows)
            assert torch.equal(own.y, images.y)
            torch.testing.assert_close(own.x, encoder.encode(images.x), atol=1e-5, rtol=1e-5)
    record = data.partition_record()
    assert record["source"] == "digits through random Kaiming"
    assert record["encoder"] == {
        "source": "digits", "name": "random Kaiming", "fingerprint": encoder.fingerprint, "n_components": None
    }  # fmt: skip
    assert "encoder" not in plain.partition_record()


def test_arguments_of_the_data_module_reach_the_images(write_idx_set, tmp_path):
    arrays = write_idx_set(tmp_path / "MNIST" / "raw", zipped=False)
    given = FederatedDataModule(Encoded("mnist", Counting(), cache_dir=None), Iid(2), root=str(tmp_path), scale="none")
    own = Encoded("mnist", Counting(), root=str(tmp_path), cache_dir=None)
    assert torch.equal(FederatedDataModule(own, Iid(2), root="nowhere", scale="none").train.x, given.train.x)
    highest = torch.from_numpy(arrays["train-images-idx3-ubyte"].max(axis=(1, 2)) / 255).float()
    torch.testing.assert_close(given.train.x[:, 1], highest[given.train.rows])
    last = np.moveaxis(np.random.default_rng(0).integers(0, 256, (6, 5, 4, 4), dtype=np.uint8), 1, 3)
    loaded = Encoded((last, None, last, None), Counting(), cache_dir=None).load(scale="none", layout="channels_last")
    assert loaded.train.x.shape == (6, 2)


def test_natural_clients_labels_and_the_held_out_part_stay(tmp_path):
    x, y, _, _ = _arrays(12)
    clients = [(x[:7], y[:7]), (x[7:], y[7:])]
    data = FederatedDataModule(
        Encoded(clients, Counting(), cache_dir=None), scale="none", transform=LabelSwaps([[], [(0, 1)]])
    )
    plain = FederatedDataModule(clients, transform=LabelSwaps([[], [(0, 1)]]))
    assert data.client_names == plain.client_names == ["0", "1"]
    assert np.array_equal(data.test.rows, plain.test.rows)
    assert data.train.y is not None
    assert plain.train.y is not None
    assert torch.equal(data.train.y, plain.train.y)
    without_test = FederatedDataModule(Encoded(clients, Counting(), cache_dir=None), scale="none", test_fraction=0.0)
    assert without_test.test.x.shape == (0, 2)
    assert len(load_source(Encoded((x,), Counting(), cache_dir=None), scale="none").train) == 10
