"""Layers that mix the samples of a batch are refused by name (and nothing is changed)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedclust.privacy.layers import require_per_sample_layers


def autoencoder(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    def block() -> nn.Sequential:
        layer = nn.GroupNorm(2, 6) if norm is nn.GroupNorm else norm(6)
        return nn.Sequential(nn.Linear(6, 6), layer, nn.ReLU())

    return nn.ModuleDict({"encoder": block(), "decoder": block()})


def test_every_batch_norm_is_named_with_a_way_out() -> None:
    with pytest.raises(ValueError, match="GroupNorm") as caught:
        require_per_sample_layers(autoencoder())
    assert "encoder.1 (BatchNorm1d), decoder.1 (BatchNorm1d)" in str(caught.value)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm2d(3),
        nn.BatchNorm3d(3, affine=False, track_running_stats=False),
        nn.SyncBatchNorm(3),
        nn.LazyBatchNorm1d(),
        nn.InstanceNorm2d(3, track_running_stats=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_the_whole_kind_is_refused(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"the module itself \({type(layer).__name__}\)"):
        require_per_sample_layers(layer)
    with pytest.raises(ValueError, match=r"1\.0 \("):
        require_per_sample_layers(nn.Sequential(nn.Linear(3, 3), nn.Sequential(layer)))


def test_layers_that_keep_samples_apart_pass() -> None:
    require_per_sample_layers(autoencoder(nn.GroupNorm))
    require_per_sample_layers(nn.Sequential(nn.LayerNorm(3), nn.InstanceNorm1d(3), nn.Dropout(), nn.Linear(3, 3)))


def test_calling_twice_changes_nothing() -> None:
    for module, refused in ((autoencoder(), True), (autoencoder(nn.GroupNorm), False)):
        before = {key: value.clone() for key, value in module.state_dict().items()}
        for _ in range(2):
            if refused:
                with pytest.raises(ValueError, match=r"encoder\.1"):
                    require_per_sample_layers(module)
            else:
                require_per_sample_layers(module)
        assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
        assert not any(m._forward_hooks or m._backward_hooks or m._forward_pre_hooks for m in module.modules())
