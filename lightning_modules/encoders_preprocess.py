"""From images as a data set has them to what a network takes: the one preprocessing of an encoder.

Accepted are images ``(n, H, W)``, ``(n, 1, H, W)`` or ``(n, 3, H, W)`` of any size, as uint8 or as floats in [0, 1].
One channel is repeated to three, the whole image is resized to a square (bilinear, with antialiasing, no cropping), and
every channel is normalised to ``(x - mean) / std``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedclust.checks import positive_int

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_SHAPES = "(n, H, W), (n, 1, H, W) or (n, 3, H, W)"
_SLACK = 1e-5  # what resizing or turning an image in float32 can add to its values


@dataclass(frozen=True)
class Preprocess:
    """Checks images and brings them into a network's form.

    Attributes:
        size: Height and width that images are resized to.
        mean: Mean that is taken off each of the three channels, of values in [0, 1].
        std: What each channel is divided by.

    Raises:
        ValueError: If the size is no whole number of at least 1.
    """

    size: int
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        positive_int("size", self.size)

    def describe(self) -> dict[str, Any]:
        """All that decides the result, as plain values."""
        return {**asdict(self), "resize": "bilinear, antialias"}

    def images(self, x: Any) -> Tensor:
        """The images as a tensor (n, 1 or 3, H, W), uint8 or float32, not yet changed.

        Args:
            x: Numpy array or tensor. Three axes are n grey images, so one colour image needs the shape (1, 3, H, W).

        Raises:
            ValueError: For another shape, type or range; says what was seen and what is needed.
        """
        if not isinstance(x, (Tensor, np.ndarray)):
            raise ValueError(f"images must be a numpy array or torch tensor, got {type(x).__name__}")
        shape = tuple(x.shape)
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[1] not in (1, 3)) or 0 in shape[1:]:
            raise ValueError(f"images must have shape {_SHAPES}, got {shape}{_hint(shape)}")
        if not isinstance(x, Tensor) and x.dtype.kind not in "fu":
            raise ValueError(_type_message(x.dtype))
        images = x.detach() if isinstance(x, Tensor) else torch.from_numpy(np.ascontiguousarray(x))
        if len(shape) == 3:
            images = images[:, None]
        if images.dtype == torch.uint8:
            return images
        if not images.is_floating_point():
            raise ValueError(_type_message(images.dtype))
        images = images.float()
        if len(images):
            low, high = (float(value) for value in torch.aminmax(images))
            if not (low >= -_SLACK and high <= 1 + _SLACK):  # False for NaN too
                raise ValueError(
                    f"float images must have values in [0, 1], got {low:.4g} to {high:.4g}; bytes can be given as uint8"
                )
        return images

    def apply(self, images: Tensor) -> Tensor:
        """What the network takes, (n, 3, size, size) float32, of images that `images` returned."""
        values = images.float() / 255 if images.dtype == torch.uint8 else images
        if values.shape[-2:] != (self.size, self.size):
            values = F.interpolate(
                values, size=(self.size, self.size), mode="bilinear", align_corners=False, antialias=True
            )  # fmt: skip
        mean, std = (torch.tensor(value, device=values.device).view(1, 3, 1, 1) for value in (self.mean, self.std))
        return (values.expand(-1, 3, -1, -1) - mean) / std


def _hint(shape: tuple[int, ...]) -> str:
    if len(shape) == 4 and shape[3] in (1, 3):
        return "; the channels are on the last axis, move them to axis 1"
    if len(shape) == 2:
        return "; flat rows have to be reshaped to images, and one image needs an axis of length 1 before it"
    return ""


def _type_message(dtype: Any) -> str:
    return f"images must be uint8 or floats in [0, 1], got {str(dtype).removeprefix('torch.')}"
