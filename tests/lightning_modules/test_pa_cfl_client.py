"""PA-CFL's user by itself: the pseudo-gradient against autograd, the step that it takes, BatchNorm buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from five_users import LR, Recorder, method
from torch import nn

from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import Iid, LabelGroups
from fedclust.federation.loop import FederatedLoop
from lightning_modules.pa_cfl import PrivateAdaptiveClient


def images(n: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.rand(n, 6, generator=rng), torch.arange(n) % 4


def test_the_gradient_of_one_full_batch_is_the_gradient(trainer: Any) -> None:
    x, y = images()
    data = FederatedDataModule((x, y), Iid(1), seed=0, val_fraction=0.0, test_fraction=0.0)
    recorder = Recorder()
    algorithm = method(privacy=False, similarity="l2")
    algorithm.observer = recorder
    loop = FederatedLoop(algorithm, PrivateAdaptiveClient("mlp", lr=LR, batch_size=len(y)))
    trainer(1).fit(loop, datamodule=data)
    client = loop.client
    client.load_exchanged(loop.state.initial)
    table = data.client(0).train
    loss = nn.functional.cross_entropy(client(table.x), table.y)
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(client.parameters()))])
    torch.testing.assert_close(recorder.of("ms", "gradient")["client 0"], expected, rtol=1e-3, atol=1e-5)
    # A user that is alone gets its own gradient back: the round is one step of gradient descent.
    own = torch.cat(
        [torch.as_tensor(v).flatten() for k, v in loop.backend.states.get(0).items() if k.startswith("own/")]
    )
    initial = torch.cat([value.flatten() for value in loop.state.initial.values()])
    torch.testing.assert_close(own, initial - LR * expected, rtol=1e-4, atol=1e-6)


class WithBatchNorm(PrivateAdaptiveClient):
    """A network with BatchNorm, whose buffers are exchanged."""

    def make_network(self, input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(*input_shape), nn.Linear(*input_shape, n_classes))


@pytest.mark.parametrize("privacy", [True, False])
def test_batch_norm_buffers_are_averaged_by_rows_inside_the_cluster(trainer: Any, privacy: bool) -> None:
    x, y = images(60)
    x = x + y[:, None] * 3.0
    data = FederatedDataModule((x, y), LabelGroups([[0, 1], [2, 3]], 3), seed=0, val_fraction=0.0)
    recorder = Recorder()
    algorithm = method(privacy=privacy, sync_period=1)
    algorithm.observer = recorder
    loop = FederatedLoop(algorithm, WithBatchNorm("mlp", lr=LR, batch_size=4))
    trainer(1).fit(loop, datamodule=data)
    name = "network.0.running_mean"
    sent = recorder.of("as", f"buffers/{name}")
    labels, sizes = loop.state.clusters.tolist(), data.n_rows
    for user in range(6):
        members = [other for other in range(6) if labels[other] == labels[user]]
        expected = sum(sizes[other] * sent[f"client {other}"] for other in members) / sum(sizes[m] for m in members)
        torch.testing.assert_close(torch.as_tensor(loop.backend.states.get(user)[f"own/{name}"]), expected)
    # A user's own statistics are not those of its cluster, else this would show nothing.
    assert not torch.allclose(sent["client 0"], torch.as_tensor(loop.backend.states.get(0)[f"own/{name}"]))
