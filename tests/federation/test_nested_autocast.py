"""Autocast keeps half-precision weights until the outermost block ends: no local loop may train on stale ones."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from fedclust.federation.batches import shuffled_batches
from fedclust.federation.context import WorkContext, make_fabric
from lightning_modules.dcn import DCN
from lightning_modules.dcn_plan import LossWeights

OUTER = {
    "enabled": lambda: torch.autocast("cpu", torch.bfloat16),
    "disabled": lambda: torch.autocast("cpu", enabled=False),
}


def trained(outer: AbstractContextManager[object]) -> dict[str, torch.Tensor]:
    module = DCN(n_clusters=3, hidden_dims=[16], latent_dim=2, input_dim=10, batch_size=8, lr=0.01)
    module.initialize(0)
    x = torch.rand(40, 10, generator=torch.Generator().manual_seed(0))
    ctx = WorkContext("client 0", 1, 0, make_fabric(torch.device("cpu"), "bf16-mixed"))
    rng = ctx.rng("batches")
    with outer:
        module.fit_locally(
            ctx,
            3,
            batches=lambda epoch: ({"x": x[rows]} for rows in shuffled_batches(len(x), 8, rng)),
            loss=lambda batch: module.terms(batch, LossWeights(1.0)),
        )
    return module.snapshot()


@pytest.mark.parametrize("kind", sorted(OUTER))
def test_an_outer_autocast_changes_nothing(kind: str) -> None:
    alone, inside = trained(nullcontext()), trained(OUTER[kind]())
    assert all(torch.equal(alone[name], inside[name]) for name in alone)
