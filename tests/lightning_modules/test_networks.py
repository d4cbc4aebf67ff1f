"""Image networks: the order of pooling and ReLU is a matter of speed only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_modules.networks import image_cnn, lenet5, small_cnn

NETWORKS = {"cnn": (image_cnn, (1, 28, 28)), "lenet5": (lenet5, (1, 28, 28)), "small_cnn": (small_cnn, (1, 8, 8))}


def with_relu_first(network: nn.Sequential) -> nn.Sequential:
    """The same layers in the textbook order, each ReLU before its pooling."""
    layers = list(network)
    for place in [i for i, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]:
        assert isinstance(layers[place + 1], nn.ReLU)
        layers[place], layers[place + 1] = layers[place + 1], layers[place]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_pooling_before_relu_gives_the_bits_of_relu_before_pooling(name: str, dtype: torch.dtype) -> None:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = build(shape, 10).to(memory_format=torch.channels_last)
    textbook = with_relu_first(network)
    x = torch.rand(16, *shape)
    # Dark images and ties: windows without any positive value, and windows of equal ones.
    x[:4] = 0
    x[4:8] = 0.5
    found = []
    for order in (network, textbook):
        order.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            outputs = order(x)
        nn.functional.cross_entropy(outputs.float(), torch.arange(16) % 10).backward()
        found.append([outputs.detach(), *(p.grad.clone() for p in order.parameters() if p.grad is not None)])
    assert len(found[0]) == 1 + len(list(network.parameters()))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_swapping_the_order_back_changes_the_layers_of_every_network() -> None:
    for build, shape in NETWORKS.values():
        network = build(shape, 10)
        assert [type(layer) for layer in with_relu_first(network)] != [type(layer) for layer in network]
