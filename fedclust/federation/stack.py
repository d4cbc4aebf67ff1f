"""Modules of several clients as one: every parameter, buffer and optimiser value has a row per client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedclust.federation.client import ClientModule
from fedclust.federation.errors import FederationError
from fedclust.federation.local import Batch, Terms
from fedclust.federation.masked_norm import MaskedNorms
from fedclust.federation.padding import RowCounts, stack_batches, stacked_clients

_PREFIX = "module."


class TogetherError(FederationError):
    """Clients cannot be trained together; says why."""


class _Loss(nn.Module):
    """The loss as a forward, for `functional_call` to give it each client's parameters and buffers."""

    def __init__(self, module: ClientModule, loss: Callable[[Batch], Terms]) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.norms = MaskedNorms(module)

    def forward(self, batch: Mapping[str, Tensor]) -> Terms:
        with self.norms.use(batch):
            return dict(self.loss(batch))


class Stack:
    """Clients that make their steps together, a row each.

    Args:
        modules: The clients' modules, equal but for the values of their parameters and buffers.
        who: The clients' names.
        optimizer: The first module's optimiser, not used yet; it becomes that of the stack.
        losses: Every module's loss.
        max_norm: Largest norm of a client's gradient; None does not clip.
    """

    def __init__(
        self,
        modules: Sequence[ClientModule],
        who: Sequence[str],
        optimizer: torch.optim.Optimizer,
        losses: Sequence[Callable[[Batch], Terms]],
        max_norm: float | None,
    ) -> None:
        self.modules, self.who, self._losses = list(modules), list(who), list(losses)
        self._own = [dict(chain(module.named_parameters(), module.named_buffers())) for module in self.modules]
        first = self._own[0]
        self._tensors = {name: _stacked([own[name] for own in self._own]) for name in first}
        self._optimizer = optimizer
        _adopt(optimizer, {first[name]: self._tensors[name] for name in first})
        self._max_norm = max_norm
        self._loss = _Loss(self.modules[0], self._losses[0])

    def __len__(self) -> int:
        return len(self.modules)

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self, batches: Sequence[Batch], autocast: AbstractContextManager[Any]) -> tuple[Terms, list[int]]:
        """One optimiser step of every client.

        Args:
            batches: The clients' batches.
            autocast: Half precision for the loss, or nothing.

        Returns:
            The detached terms, a value per client (clients,), and the rows of clients whose batch was too small for
            BatchNorm; their values mean nothing.

        Raises:
            TogetherError: If the loss cannot be computed for several clients at once, or ignores masks that it needs.
        """
        batch, counts = stack_batches(batches, self.who)
        if counts and not self.modules[0].honours_row_masks:
            raise TogetherError(
                f"the batches of {self.who[0]} and others differ in their numbers of rows, and "
                f"{type(self.modules[0]).__name__} does not declare honours_row_masks = True; see "
                "docs/adding_a_method.md, or use fedclust.InProcess"
            )
        self._optimizer.zero_grad()
        # See ClientModule._step: stale half-precision weights would stay in the cache.
        torch.clear_autocast_cache()
        self._loss.norms.seen.clear()
        with autocast, stacked_clients():
            terms = self._terms(batch)
        torch.autograd.backward(terms["loss"].sum())
        if self._max_norm is not None:
            self._clip(self._max_norm)
        self._optimizer.step()
        return {name: value.detach() for name, value in terms.items()}, self._too_few(counts)

    def _terms(self, batch: Mapping[str, Tensor]) -> Terms:
        def of_one(tensors: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> Terms:
            named = {_PREFIX + name: value for name, value in tensors.items()}
            return functional_call(self._loss, named, (one,))

        try:
            return vmap(of_one)(self._tensors, batch)
        except Exception as error:
            module = self.modules[0]
            where = _layer_of(error, module)
            raise TogetherError(
                f"{type(module).__name__}{where} cannot be trained for several clients at once: "
                f"{type(error).__name__}: {error}; use fedclust.InProcess or fedclust.Processes"
            ) from error

    def _clip(self, max_norm: float) -> None:
        """`torch.nn.utils.clip_grad_norm_` of what the optimiser changes, for every client by itself."""
        tensors = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        if not gradients:
            return
        norms = torch.stack([torch.linalg.vector_norm(grad.reshape(len(grad), -1), dim=1) for grad in gradients])
        factors = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
        for grad in gradients:
            grad.mul_(factors.view(-1, *[1] * (grad.ndim - 1)))

    def _too_few(self, counts: RowCounts) -> list[int]:
        found = {
            row
            for length, positions in self._loss.norms.seen
            for row, real in enumerate(counts[length])
            if real * positions < 2
        }
        return sorted(found)

    # -- between steps --------------------------------------------------------------------------------------------

    @contextmanager
    def look(self, row: int) -> Iterator[None]:
        """One client's module has its current values inside the block; what the block changes comes back."""
        own = self._own[row]
        with torch.no_grad():
            for name, stacked in self._tensors.items():
                own[name].copy_(stacked[row])
        yield
        with torch.no_grad():
            for name, stacked in self._tensors.items():
                stacked[row].copy_(own[name])

    def leave(self, rows: Sequence[int]) -> list[bool]:
        """Writes the values of these clients back into their modules and takes their rows out.

        Returns:
            Whether all that each of them would exchange is finite, in the order of `rows`.
        """
        with torch.no_grad():
            finite = self._finite()
            for name, stacked in self._tensors.items():
                values = stacked.unbind()
                for row in rows:
                    self._own[row][name].copy_(values[row])
        self._keep([row for row in range(len(self)) if row not in set(rows)])
        return [finite[row] for row in rows]

    def _finite(self) -> list[bool]:
        exchanged = self.modules[0].exchanged()
        flags = [
            torch.isfinite(stacked).reshape(len(stacked), -1).all(1)
            for name, stacked in self._tensors.items()
            if name in exchanged and stacked.is_floating_point()
        ]
        return [bool(flag) for flag in torch.stack(flags).all(0).tolist()]

    def _keep(self, rows: list[int]) -> None:
        self.modules, self.who = [self.modules[row] for row in rows], [self.who[row] for row in rows]
        self._losses, self._own = [self._losses[row] for row in rows], [self._own[row] for row in rows]
        if not rows:
            return
        # A module in the stack is in the midst of an epoch, so in training mode; one that has left may be in the other.
        self._loss = _Loss(self.modules[0], self._losses[0])
        index = torch.tensor(rows, device=next(iter(self._tensors.values())).device)
        fewer = {
            name: stacked.detach()[index].requires_grad_(stacked.requires_grad)
            for name, stacked in self._tensors.items()
        }
        _adopt(self._optimizer, {old: fewer[name] for name, old in self._tensors.items()}, index)
        self._tensors = fewer


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.detach() for tensor in tensors]).requires_grad_(tensors[0].requires_grad)


def _adopt(optimizer: torch.optim.Optimizer, to: Mapping[Tensor, Tensor], index: Tensor | None = None) -> None:
    """Has an optimiser go on with other tensors; what it keeps per element follows, row by row.

    Args:
        optimizer: Element-wise in all that it does.
        to: Its tensors → those that take their place.
        index: The rows that stay; None repeats what it has, one row per client.
    """
    state: dict[Tensor, dict[str, Any]] = {}
    for old, values in optimizer.state.items():
        new = to[old]
        state[new] = {}
        for name, value in values.items():
            # The number of steps is the same for all clients of a stack, since those that are done have left.
            if name == "step" or not isinstance(value, Tensor) or value.shape != old.shape:
                state[new][name] = value
            elif index is not None:
                state[new][name] = value[index]
            else:
                state[new][name] = value.expand(new.shape).clone()
    for group in optimizer.param_groups:
        group["params"] = [to[old] for old in group["params"]]
    optimizer.state.clear()
    optimizer.state.update(state)


def _layer_of(error: BaseException, module: nn.Module) -> str:
    """The innermost layer of the module in which an error arose, for a message."""
    names = {id(layer): name for name, layer in module.named_modules() if name}
    found, step = "", error.__traceback__
    while step is not None:
        name = names.get(id(step.tb_frame.f_locals.get("self")))
        if name is not None:
            found = f", layer {name!r} ({type(module.get_submodule(name)).__name__}),"
        step = step.tb_next
    return found
