"""Clipping in half precision with fused optimisers: under a loss scale, and under a plain Trainer.

A CPU makes 16-mixed into bf16-mixed, so the plugins of a GPU run are made by hand here.
"""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision
from pytorch_lightning.plugins.precision import MixedPrecision as TrainersMixedPrecision
from torch import Tensor, nn

from fedclust.federation.client import ClientModule
from fedclust.federation.context import WorkContext
from lightning_modules.classifier import Classifier

X = torch.rand(40, 5, generator=torch.Generator().manual_seed(1))
CLIPS = [None, 0.05]


class Fused(ClientModule):
    """Learns to double its input, with large gradients."""

    draws_in_training = False

    def __init__(self, clip: float | None, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> None:
        super().__init__()
        self.net = nn.Linear(5, 5)
        self.max_grad_norm = clip
        self.kind = optimizer
        self.initialize(3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.05, fused=True)  # type: ignore[call-arg]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 10 * (self.net(batch["x"]) - 2 * batch["x"]).square().mean()


def batches(epoch: int) -> list[dict[str, Tensor]]:
    return [{"x": X[start : start + 10]} for start in range(0, 40, 10)]


def scaled_by_hand(module: Fused, epochs: int) -> None:
    """The same training as a bare PyTorch loop, with an optimiser that is not fused."""
    optimizer = module.kind(module.parameters(), lr=0.05, fused=False)  # type: ignore[call-arg]
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(epochs):
        for batch in batches(epoch):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = module.training_step(batch, 0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if module.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), module.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()


def flat(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_local_training_clips_what_a_loss_scale_was_taken_off_of(clip: float | None, kind: Any) -> None:
    ours, bare = Fused(clip, kind), Fused(clip, kind)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MixedPrecision("16-mixed", "cpu"))
    ours.fit_locally(WorkContext("client 0", 1, 0, fabric), 2, batches=batches)
    scaled_by_hand(bare, 2)
    assert not torch.equal(flat(ours), flat(Fused(clip)))
    torch.testing.assert_close(flat(ours), flat(bare), rtol=1e-5, atol=1e-6)


def fit(module: pl.LightningModule, **options: Any) -> None:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones"), False
    )
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, num_sanity_val_steps=0, **quiet, **options)
    rows = [{"x": X[row], "y": torch.tensor(row % 2)} for row in range(40)]
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=10))  # type: ignore[arg-type]


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_plain_trainer_clips_under_a_loss_scale(clip: float | None) -> None:
    ours, bare = Fused(clip), Fused(clip)
    fit(ours, plugins=TrainersMixedPrecision("16-mixed", "cpu"))
    scaled_by_hand(bare, 2)
    torch.testing.assert_close(flat(ours), flat(bare), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [{"max_grad_norm": 0.05}, {"gradient_clip_val": 0.05}])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_plain_trainer_clips_in_bf16_as_local_training_does(clip: dict[str, float], context: Any) -> None:
    ours, local = Fused(clip.get("max_grad_norm")), Fused(0.05)
    fit(ours, precision="bf16-mixed", gradient_clip_val=clip.get("gradient_clip_val"))
    local.fit_locally(context(precision="bf16-mixed"), 2, batches=batches)
    assert torch.equal(flat(ours), flat(local))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_classifier_with_a_clipped_gradient_trains_centrally_in_bf16() -> None:
    module = Classifier("linear", max_grad_norm=0.1)
    module.build((5,), 2)
    before = flat(module).clone()
    fit(module, precision="bf16-mixed")
    assert 0 < float((flat(module) - before).norm()) <= 8 * 0.1 * module.lr * 1.001
