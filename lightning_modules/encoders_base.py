"""`Encoder`: a frozen network that turns images into features, and the pieces that its subclasses share.

An encoder is no `torch.nn.Module` on purpose. As an attribute of a client module it then stays what it is: Lightning's
`train()` and `precision` do not reach it, `ClientModule.initialize` does not draw its weights anew, and neither
messages nor checkpoints carry it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from fedclust.checks import choice, positive_int
from fedclust.federation.context import emulated
from fedclust.random import torch_generator
from lightning_modules.encoders_preprocess import Preprocess

Precision = Literal["32-true", "bf16-mixed"]
_PRECISIONS = ("32-true", "bf16-mixed")
_WRAPPERS = ("state_dict", "model")  # names under which training scripts store the weights


class Frozen(nn.Module):
    """A network in evaluation mode, without gradients, whatever `train()` says."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stays in evaluation mode: a Trainer sets every module of a model to training mode before it fits."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Features of normalised images, one row per image."""
        features: Tensor = self.body(x)
        return features.flatten(1)


class Encoder:
    """A frozen feature extractor for images.

    Args:
        network: Maps normalised images (n, 3, size, size) to features (n, d). It is frozen here.
        preprocess: Brings images into the network's form.
        name: Name of the architecture, for records.
        batch_size: Images per pass; changes memory and speed, not the features.
        precision: "32-true", or "bf16-mixed" where the device has instructions for it.
        device: Where the network computes, such as "cpu" or "cuda".

    Attributes:
        network: The frozen network.
        feature_dim: Number of features.
        init_args: Plain arguments that the subclass was made from, so that checkpoints can name it.

    Raises:
        ValueError: For an argument outside its range, half precision that would only be emulated, or a network that
            cannot take images of this size.
    """

    init_args: dict[str, Any]

    def __init__(
        self,
        network: nn.Module,
        preprocess: Preprocess,
        *,
        name: str,
        batch_size: int = 64,
        precision: Precision = "32-true",
        device: str = "cpu",
    ) -> None:
        self.name = name
        self.preprocess = preprocess
        self.batch_size = positive_int("batch_size", batch_size)
        self.precision = choice("precision", precision, _PRECISIONS)
        self.device = torch.device(device)
        if emulated(self.device, self.precision):
            raise ValueError(
                f"precision {precision!r} is only emulated on this CPU, many times slower than float32; use '32-true'"
            )
        self.network = Frozen(network).to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        try:
            with torch.no_grad():
                probe = self._features(torch.zeros(1, 1, preprocess.size, preprocess.size))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise ValueError(f"{name} cannot take images of size {preprocess.size}: {error}") from error
        self.feature_dim = probe.shape[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Encoder:
        """Itself: it never changes, so that copies of a client module share it."""
        return self

    @property
    def fingerprint(self) -> str:
        """Digest of architecture, weights, buffers, preprocessing and precision: equal if the features are."""
        what = {"name": self.name, "precision": self.precision, **self.preprocess.describe()}
        digest = hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16)
        for name, tensor in [*self.network.named_parameters(), *self.network.named_buffers()]:
            values = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            digest.update(values.reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def encode(self, x: Any) -> Tensor:
        """Features of images, (n, feature_dim) float32 on the CPU, without gradient.

        Args:
            x: Images (n, H, W), (n, 1, H, W) or (n, 3, H, W), uint8 or floats in [0, 1]; array or tensor. Three axes
                are n grey images, so one colour image needs the shape (1, 3, H, W).

        Raises:
            ValueError: For images of another shape, type or range, or features that are not finite.
        """
        images = self.preprocess.images(x)
        # Tensors made in Lightning's inference mode could not be trained on later, hence no_grad alone.
        with torch.inference_mode(False), torch.no_grad():
            features = torch.empty(len(images), self.feature_dim)
            for start in range(0, len(images), self.batch_size):
                rows = slice(start, start + self.batch_size)
                features[rows] = self._features(images[rows])
        bad = ~features.isfinite().all(1)
        if bad.any():
            first = int(bad.nonzero()[0])
            raise ValueError(f"{self.name} gives NaN or infinite features for {int(bad.sum())} images, first {first}")
        return features

    def _features(self, images: Tensor) -> Tensor:
        self.network.eval()  # a module inside it could have been switched by itself
        half = self.precision == "bf16-mixed"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            inputs = self.preprocess.apply(images.to(self.device)).contiguous(memory_format=torch.channels_last)
            features: Tensor = self.network(inputs)
            return features.float().cpu()


def given(local: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor, from its `locals()` on its first line."""
    return {name: value for name, value in local.items() if name not in ("self", "__class__")}


def kaiming(network: nn.Module, seed: int) -> None:
    """Draws the weights of all convolutions and linear layers after Kaiming from (seed, "encoder", layer); biases 0."""
    for name, module in network.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            generator = torch_generator(seed, "encoder", name)
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def is_file(weights: str) -> bool:
    """Whether `weights` means a file and not a name."""
    path = Path(weights).expanduser()
    return path.is_file() or len(path.parts) > 1 or path.suffix in (".pt", ".pth", ".bin", ".safetensors")


def read_weights(weights: str) -> dict[str, Tensor]:
    """Tensors by name of a weight file: what `torch.save` wrote of a state, or safetensors. Runs no code of the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds no tensors by name.
    """
    path = Path(weights).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"weights: there is no file {path.absolute()}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(str(path))
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # the two readers raise many types for a damaged file
        text = " ".join(str(error).split())[:200]
        raise ValueError(f"weights: {path} is no file of tensors by name: {text}") from error
    for wrapper in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"weights: {path} holds no tensors by name")
    return {str(name).removeprefix("module."): tensor for name, tensor in found.items()}


def load_weights(network: nn.Module, weights: str, without: Sequence[str]) -> None:
    """Loads a weight file into a network; the tensors of the layers `without`, which were cut off, are left out.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds no tensors by name, or names or shapes do not fit; says which.
    """
    cut = tuple(f"{name}." for name in without)
    kept = {name: tensor for name, tensor in read_weights(weights).items() if not name.startswith(cut)}
    own = network.state_dict()
    missing, unknown = sorted(own.keys() - kept.keys()), sorted(kept.keys() - own.keys())
    shapes = [
        f"{name}: {tuple(kept[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in kept and kept[name].shape != own[name].shape
    ]
    # Files from before PyTorch 0.4.1 lack this counter, which evaluation does not use.
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    problems = [
        f"{what} {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("unknown", unknown), ("shape", shapes))
        if names
    ]
    if problems:
        raise ValueError(f"weights {weights} do not fit {type(network).__name__}: {'; '.join(problems)}")
    network.load_state_dict(kept, strict=False)
