"""One client's local training, batch by batch: what is the same whether it trains alone or together with others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from fedclust.federation.context import WorkContext
from fedclust.federation.errors import NonFiniteLossError

Batch = Mapping[str, torch.Tensor]
Terms = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LocalFit:
    """What a local training loop did.

    Attributes:
        n_steps: Optimiser steps made; 0 means that the weights did not move.
        terms: Mean of every loss term over the steps of the last epoch, unweighted, by name.
    """

    n_steps: int
    terms: dict[str, float]


@dataclass(frozen=True)
class LocalWork:
    """What one call of `ClientModule.fit_locally` asks for; see there."""

    epochs: int
    batches: Callable[[int], Iterable[Batch]]
    loss: Callable[[Batch], Terms]
    after_epoch: Callable[[int], None] | None = None


class Sums(Protocol):
    """Sums of the loss terms over the steps of the current epoch."""

    def take(self, steps: int) -> dict[str, float]:
        """The mean terms over so many steps; starts the next epoch's sums."""
        ...


class EpochSums:
    """Running sums of the terms, on the device: reading one out per batch would stall a GPU."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, terms: Terms) -> None:
        """Adds the terms of one step."""
        for name, value in terms.items():
            detached = value.detach()
            self._sums[name] = self._sums[name] + detached if name in self._sums else detached

    def take(self, steps: int) -> dict[str, float]:
        """See `Sums.take`."""
        means = {name: float(total) / steps for name, total in self._sums.items()}
        self._sums = {}
        return means


class LocalRun:
    """The epochs of one client; whoever iterates over `batches` makes a step on each and adds its terms to the sums.

    Args:
        module: The client's module.
        ctx: Names the client and the round.
        work: Epochs, batches and what happens after an epoch.
        sums: Where the steps' terms are summed.
        look: Entered around `after_epoch`, for a driver that keeps the weights elsewhere.
    """

    def __init__(
        self,
        module: nn.Module,
        ctx: WorkContext,
        work: LocalWork,
        sums: Sums,
        look: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._module, self._ctx, self._work, self._sums, self._look = module, ctx, work, sums, look
        self._n_steps, self._means, self._last_finite = 0, dict[str, float](), math.nan

    def batches(self) -> Iterator[Batch]:
        """The batches of all epochs, one after the other.

        Raises:
            NonFiniteLossError: If the mean loss of an epoch is NaN or infinite.
        """
        for epoch in range(self._work.epochs):
            # Only where something may have left training mode: the call visits every layer, once per client and epoch.
            if epoch == 0 or self._work.after_epoch is not None or not self._module.training:
                self._module.train()
            steps = 0
            for batch in self._work.batches(epoch):
                yield batch
                steps += 1
            self._n_steps += steps
            if steps:
                self._means = self._sums.take(steps)
                if not math.isfinite(self._means["loss"]):
                    raise self._not_finite(epoch, self._means["loss"], "loss")
                self._last_finite = self._means["loss"]
            if self._work.after_epoch is not None:
                with self._look():
                    self._work.after_epoch(epoch)

    def finish(self, all_finite: Callable[[], bool]) -> LocalFit:
        """What was done.

        Args:
            all_finite: Says whether all that would be exchanged is finite; asked only if a step was made.

        Raises:
            NonFiniteLossError: If it is not.
        """
        if self._n_steps and not all_finite():
            raise self._not_finite(self._work.epochs - 1, math.nan, "weights")
        return LocalFit(self._n_steps, self._means)

    def _not_finite(self, epoch: int, value: float, what: str) -> NonFiniteLossError:
        return NonFiniteLossError(self._ctx.who, self._ctx.round, epoch, value, self._last_finite, what=what)
