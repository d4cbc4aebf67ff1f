"""Every method: clients trained together give what clients trained one after the other give, but for rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedclust.algorithms.feddcn import FedDCN
from fedclust.federation.backend import InProcess
from fedclust.federation.vectorised import Vectorised
from lightning_modules.dcn import DCN

SIZES = (30, 7, 52, 18)


@pytest.fixture
def method(method: Any) -> Any:
    """FedDCN without BatchNorm: before one a bias has no gradient but rounding errors, which Adam makes whole steps of,
    other ones for every order of summation, and the counts of synthetic rows then differ. See test_vectorised.py.
    """
    if not isinstance(method.algorithm(), FedDCN):
        return method
    settings = {"n_clusters": 3, "hidden_dims": [8], "latent_dim": 2, "batch_size": 8, "lr": 0.01}
    return replace(method, client=lambda: DCN(**settings, normalization="group"))


def numbers(run: Any) -> dict[str, torch.Tensor]:
    """Server state, client state and metrics as tensors."""
    found = dict(run.loop.state.to_flat())
    for client in range(run.data.n_clients):
        found |= {f"client {client}/{name}": value for name, value in run.loop.backend.states.get(client).items()}
    found |= run.metrics()
    return {name: torch.as_tensor(value) for name, value in found.items() if not isinstance(value, (str, type(None)))}


@pytest.mark.parametrize("per_batch", [32, 3])
def test_equals_in_process(run: Any, blobs: Any, per_batch: int) -> None:
    expected = run(2, data=blobs(SIZES), backend=InProcess())
    found = run(2, data=blobs(SIZES), backend=Vectorised(per_batch), folder="together")
    ours, theirs = numbers(found), numbers(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].shape == value.shape, name
        assert torch.allclose(ours[name].double(), value.double(), rtol=1e-5, atol=1e-5), name
    assert found.loop.byte_counts() == expected.loop.byte_counts()
