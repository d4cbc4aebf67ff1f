"""A network to train together with others, and the comparison of two backends' replies."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedclust.federation.backend import Backend
from fedclust.federation.batches import shuffled_batches
from fedclust.federation.client import ClientModule, action
from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message, tensors_under, with_prefix
from fedclust.federation.padding import mask_of, mean_squared_error

SIZES = (30, 4, 9, 17, 52)  # batches of 8: ragged ends, one batch only, many steps
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD fused": partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "Adam": partial(torch.optim.Adam, lr=0.01, eps=1e-3),
    "Adam fused": partial(torch.optim.Adam, lr=0.01, eps=1e-3, amsgrad=True, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.003, eps=1e-3, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02, eps=1e-3, initial_accumulator_value=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5, eps=1e-3),
}
BODIES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 6)),
    "cumulative BatchNorm": lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None, affine=False), nn.Linear(6, 6)),
    "image BatchNorm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(8, 6)
    ),
    "GroupNorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 6)),
}


class Net(ClientModule):
    """Learns to reproduce its rows; every way to go wrong is an argument of its action."""

    draws_in_training = False
    honours_row_masks = True

    def __init__(self, body: str = "plain", optimizer: str = "SGD", clip: float | None = None) -> None:
        super().__init__()
        self.net, self.optimizer, self.max_grad_norm = BODIES[body](), optimizer, clip
        self.scale = 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())

    def terms(self, batch: Any, factor: float = 1.0) -> dict[str, Tensor]:
        error = mean_squared_error(self.net(batch["x"]), batch["x"], mask_of(batch, "x"))
        return {"loss": factor * self.scale * error, "error": error}

    @action
    def learn(self, message: Message, ctx: ClientContext) -> Message:
        self.load_exchanged(tensors_under("weights", message))
        x, rng = ctx.data.train.x, ctx.rng("batches")
        if message.get("poison") == ctx.id:
            x = x * math.inf
        if "scales" in message:
            self.scale = float(torch.as_tensor(message["scales"])[ctx.id])

        def batches(epoch: int) -> Any:
            for rows in shuffled_batches(len(x), 8, rng):
                yield {"x": x[rows]}
                if message.get("fail") == ctx.id and epoch == 1:
                    raise OSError("disk full")

        factor = 2.0 + (ctx.id if message.get("own_factor") else 0)
        loss: Any = (lambda b: self.terms(b)) if message.get("anonymous") else partial(self.terms, factor=factor)
        epochs = torch.as_tensor(message["epochs"]).expand(len(SIZES))[ctx.id]
        fit = self.fit_locally(ctx, int(epochs), batches=batches, loss=loss)
        return {"n_steps": fit.n_steps, **with_prefix("term", dict(fit.terms)), **with_prefix("w", self.snapshot())}


def ask(backend: Backend, **message: Any) -> dict[int, Message]:
    shared = {**with_prefix("weights", backend.module.snapshot()), "epochs": 3, **message}
    return backend.ask("learn", {client: {} for client in range(backend.data.n_clients)}, shared=shared)


def assert_close(ours: dict[int, Message], theirs: dict[int, Message], atol: float = 1e-5, without: str = " ") -> None:
    assert ours.keys() == theirs.keys()
    for client, reply in theirs.items():
        assert ours[client].keys() == reply.keys()
        for name, value in reply.items():
            if without not in name:
                found, expected = torch.as_tensor(ours[client][name]), torch.as_tensor(value)
                assert found.dtype == expected.dtype
                assert torch.allclose(found.double(), expected.double(), rtol=0, atol=atol), (client, name)
