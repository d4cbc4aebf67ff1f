"""`Vectorised`: the local training of many clients as one computation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch.nn.modules.dropout import _DropoutNd

from fedclust.checks import positive_int
from fedclust.federation.backend import Backend
from fedclust.federation.client import ClientModule
from fedclust.federation.context import ClientContext
from fedclust.federation.local import LocalFit, LocalWork
from fedclust.federation.message import Message
from fedclust.federation.resident import ClientSource, Outcome, Resident, Trip
from fedclust.federation.stack import TogetherError
from fedclust.federation.together import Member, check_elementwise, train_together
from fedclust.federation.turns import Turns


class Vectorised(Backend):
    """Trains clients of equal architecture together: one computation over stacked parameters instead of one each.

    Equal to `InProcess` but for rounding. Worth its while for many clients with small models and few rows, and on GPUs;
    large models on a CPU lose. Every client of a batch has a copy of the module, and while it trains a row of
    the stack: memory grows with `clients_per_batch`.

    Actions run as they are, one client after the other; where they call `fit_locally` all clients of the batch wait for
    each other and are trained together. Batches of unequal sizes are padded and masked; a client that is done leaves.

    Args:
        clients_per_batch: How many clients are trained together at most.
        threads: torch's intra-op threads; see `Backend`.
        on_failure: "raise" or "skip"; see `Backend`.
        state_budget_mb: Client state kept in memory; see `Backend`.

    Raises:
        ValueError: For numbers out of range.
    """

    def __init__(
        self,
        clients_per_batch: int = 32,
        threads: int | None = 1,
        on_failure: Literal["raise", "skip"] = "raise",
        state_budget_mb: float | None = None,
    ) -> None:
        super().__init__(threads, on_failure, state_budget_mb)
        self.clients_per_batch = positive_int("clients_per_batch", clients_per_batch)
        self._free: list[_Copy] = []

    def connect(
        self, module: ClientModule, data: ClientSource, *, seed: int, device: torch.device, precision: str
    ) -> None:
        """See `Backend.connect`.

        Raises:
            ValueError: If the module's training draws random numbers, its optimiser is not element-wise, or the
                precision needs a loss scale per client.
        """
        refuse(module, precision)
        self.close()
        super().connect(module, data, seed=seed, device=device, precision=precision)

    def use(self, device: torch.device, precision: str) -> None:
        """See `Backend.use`."""
        refuse(self.module, precision)
        self.close()
        super().use(device, precision)

    def close(self) -> None:
        """Drops the copies of the module; the next question makes new ones."""
        self._free = []

    def run(self, actions: list[str], messages: Mapping[int, Message], shared: Message) -> Generator[Outcome]:
        """Runs the clients in batches, in the order of their ids."""
        clients = list(messages)
        with closing(Turns(self._work, train_together, self._prepare)) as turns:
            for start in range(0, len(clients), self.clients_per_batch):
                chunk = clients[start : start + self.clients_per_batch]
                trips = [self.trip(client, actions, {**shared, **messages[client]}) for client in chunk]
                with self.limited_threads():
                    outcomes = turns.do(trips)
                yield from outcomes

    def _work(self, trip: Trip, wait: Callable[[Member], None]) -> Outcome:
        """One client's trip, on a copy of the module that no other client has meanwhile."""
        own = self._free.pop() if self._free else _Copy(self.resident)

        def together(module: ClientModule, ctx: ClientContext, work: LocalWork) -> LocalFit:
            member = Member(module, ctx, work, own.changed())
            wait(member)
            if member.error is not None:
                raise member.error
            assert member.result is not None
            return member.result

        try:
            return own.resident.work(trip, together)
        finally:
            self._free.append(own)

    def _prepare(self) -> None:
        if self.resident.device.type == "cuda":
            torch.cuda.set_device(self.resident.device)


class _Copy:
    """The resident with a copy of its module, and which of the module's attributes were set since."""

    def __init__(self, resident: Resident) -> None:
        with torch.inference_mode(False):
            self.resident = replace(resident, module=copy.deepcopy(resident.module))
        self._before = dict(vars(self.resident.module))

    def changed(self) -> dict[str, Any]:
        """The attributes that actions have set; the training mode is not among them, local training sets it itself."""
        now = vars(self.resident.module)
        return {
            name: value
            for name, value in now.items()
            if name != "training" and self._before.get(name, self) is not value
        }


def refuse(module: ClientModule, precision: str) -> None:
    """Raises ValueError, before anything runs, for what cannot be trained for several clients at once.

    Args:
        module: The resident module.
        precision: Lightning's name of the precision.
    """
    name = type(module).__name__
    if precision == "16-mixed":
        raise ValueError(
            "backend Vectorised: precision '16-mixed' would need a loss scale per client; allowed are 32-true and "
            "bf16-mixed"
        )
    trains = type(module).configure_optimizers is not pl.LightningModule.configure_optimizers
    if not trains or not any(parameter.requires_grad for parameter in module.parameters()):
        return
    drawing = [path for path, layer in module.named_modules() if isinstance(layer, _DropoutNd) and layer.p > 0]
    if drawing or module.draws_in_training:
        why = f"layers {drawing} draw" if drawing else "draws_in_training is not set to False, so it may draw"
        raise ValueError(
            f"backend Vectorised cannot train {name}: {why} random numbers in training, which clients trained together "
            "would not get from generators of their own; use fedclust.InProcess or fedclust.Processes"
        )
    try:
        check_elementwise(module.local_optimizer())
    except TogetherError as error:
        raise ValueError(f"backend Vectorised cannot train {name}: {error}") from error
