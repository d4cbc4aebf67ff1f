"""BatchNorm over the real rows of a padded batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from fedclust.federation.padding import MASK


class MaskedNorms:
    """Gives the BatchNorm layers of a module another forward while several clients are computed together.

    Without masks only those layers get it that PyTorch cannot compute for several clients, cumulative averages.

    Attributes:
        seen: (rows, positions per row) of every input that a layer normalised by its own statistics.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
        self._leaking = [
            name
            for name, layer in module.named_modules()
            if isinstance(layer, _InstanceNorm) and layer.track_running_stats
        ]
        self.seen: set[tuple[int, int]] = set()

    @contextmanager
    def use(self, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """Statistics, running statistics and normalisation in training mode come from real rows only.

        Args:
            batch: With a mask "mask/name" (n,) per entry, or none; padded lengths tell the masks apart.

        Raises:
            ValueError: For a layer that cannot leave padded rows out.
        """
        masks = {len(mask): mask for name, mask in batch.items() if name.startswith(MASK)}
        if masks and self._leaking:
            raise ValueError(
                f"layers {self._leaking} (InstanceNorm with running statistics) cannot leave padded rows out"
            )
        layers = {name: layer for name, layer in self._layers.items() if masks or layer.momentum is None}
        for name, layer in layers.items():
            layer.forward = partial(self._forward, name, layer, masks)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in layers.values():
                del layer.__dict__["forward"]

    def _forward(self, name: str, layer: _BatchNorm, masks: Mapping[int, Tensor], x: Tensor) -> Tensor:
        if not layer.training and layer.running_mean is not None:
            return type(layer).forward(layer, x)
        layer._check_input_dim(x)  # type: ignore[no-untyped-call]
        positions = prod(x.shape[2:])
        if not masks:
            if len(x) * positions < 2:
                raise ValueError(f"BatchNorm {name!r} needs more than one value per channel in training")
            return normalise(layer, x, x.new_ones(len(x), dtype=torch.float32))
        if len(x) not in masks:
            raise ValueError(
                f"BatchNorm {name!r} got {len(x)} rows, the padded batch has {sorted(masks)}: it must see a batch's "
                "rows one for one"
            )
        self.seen.add((len(x), positions))
        return normalise(layer, x, masks[len(x)])


def normalise(layer: _BatchNorm, x: Tensor, mask: Tensor) -> Tensor:
    """BatchNorm in training mode of x (n, channels, …) by the rows where the mask (n,) is 1; updates the statistics."""
    values = x.float()
    shape = (1, -1, *[1] * (x.ndim - 2))
    others = [0, *range(2, x.ndim)]
    weights = mask.view(-1, *[1] * (x.ndim - 1))
    count = mask.sum() * prod(x.shape[2:])
    mean = (values * weights).sum(others) / count
    centred = values - mean.view(shape)
    var = (centred.square() * weights).sum(others) / count
    if layer.training and layer.track_running_stats and layer.running_mean is not None:
        _track(layer, mean.detach(), var.detach() * (count / (count - 1)))
    normal = centred * torch.rsqrt(var + layer.eps).view(shape)
    if layer.weight is not None:
        normal = normal * layer.weight.view(shape)
    if layer.bias is not None:
        normal = normal + layer.bias.view(shape)
    return normal.to(x.dtype)


@torch.no_grad()
def _track(layer: _BatchNorm, mean: Tensor, var: Tensor) -> None:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    share = 1 / layer.num_batches_tracked.float() if layer.momentum is None else layer.momentum
    layer.running_mean.mul_(1 - share).add_(mean * share)
    layer.running_var.mul_(1 - share).add_(var * share)
