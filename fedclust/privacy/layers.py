"""Layers that cannot be used where each sample's contribution must stay bounded."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def require_per_sample_layers(module: nn.Module) -> None:
    """Check that no layer of ``module`` mixes the samples of a batch; changes nothing, however often it is called.

    Batch normalisation makes each sample's output depend on the whole batch, so a gradient clipped per sample bounds
    nothing, and its running statistics leave without noise. The latter holds for instance normalisation that tracks
    running statistics as well.

    Raises:
        ValueError: naming the path and type of every such layer.
    """
    found = [
        f"{path or 'the module itself'} ({type(layer).__name__})"
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) or (isinstance(layer, _InstanceNorm) and layer.track_running_stats)
    ]
    if found:
        raise ValueError(
            f"privacy per sample is impossible with layers that mix the samples of a batch: {', '.join(found)}; "
            "use torch.nn.GroupNorm (or LayerNorm) instead"
        )
