"""Local fits of several clients, done together: step t of one is made with step t of all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedclust.federation.client import ClientModule
from fedclust.federation.context import ClientContext
from fedclust.federation.local import Batch, LocalFit, LocalRun, LocalWork, Terms
from fedclust.federation.stack import Stack, TogetherError

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)


@dataclass(eq=False)
class Member:
    """One client's local fit, among others.

    Attributes:
        module: The client's own module.
        ctx: The client's context.
        work: What it asked for.
        changed: Attributes of the module that the client's actions have set.
        result: What was done, once it is.
        error: Why it was not.
    """

    module: ClientModule
    ctx: ClientContext
    work: LocalWork
    changed: Mapping[str, Any] = field(default_factory=dict)
    result: LocalFit | None = None
    error: Exception | None = None
    batch: Batch | None = None
    run: LocalRun | None = None
    _batches: Iterator[Batch] = field(default_factory=lambda: iter(()))

    def begin(self, sums: StackSums, look: Callable[[], AbstractContextManager[None]]) -> None:
        """Starts the epochs: the first batch is ready afterwards, or there is none."""
        self.run = LocalRun(self.module, self.ctx, self.work, sums.of(self), look)
        self._batches = self.run.batches()
        self.advance()

    def advance(self) -> None:
        """Goes on to the next batch; without one, the member is done or has failed."""
        try:
            self.batch = next(self._batches, None)
        except Exception as error:  # raised again in the client's own thread
            self.batch, self.error = None, error

    def finish(self, finite: bool) -> None:
        """Makes the result."""
        assert self.run is not None
        try:
            self.result = self.run.finish(lambda: finite)
        except Exception as error:
            self.error = error


def train_together(members: Sequence[Member]) -> None:
    """Does the local fits of clients that wait for it; every member has a result or an error afterwards.

    Fits by the same loss are done together. A client that fails leaves; the others go on.
    """
    for group in _by_loss(members).values():
        try:
            optimizer = _common_optimizer(group)
            with torch.enable_grad():
                _train(group, optimizer)
        except Exception as error:
            for member in group:
                if member.result is None and member.error is None:
                    member.error = TogetherError(str(error))
                    member.error.__cause__ = error


def _train(group: Sequence[Member], optimizer: torch.optim.Optimizer) -> None:
    sums = StackSums(group)
    stack: Stack | None = None
    rows: list[Member] = []

    def look_at(member: Member) -> AbstractContextManager[None]:
        return nullcontext() if stack is None else stack.look(rows.index(member))

    for member in group:
        member.begin(sums, partial(look_at, member))
        if member.batch is None and member.error is None:
            member.finish(True)
    rows += [member for member in group if member.batch is not None]
    if not rows:
        return
    sums.keep([group.index(member) for member in rows])
    first = rows[0]
    names = [member.ctx.who for member in rows]
    if first is not group[0]:
        optimizer = first.module.local_optimizer()
    losses = [member.work.loss for member in rows]
    stack = Stack([member.module for member in rows], names, optimizer, losses, first.module.max_grad_norm)
    while rows:
        terms, too_few = stack.step([_batch(member) for member in rows], first.ctx.fabric.autocast())
        sums.add(terms)
        for row in too_few:
            rows[row].batch = None
            rows[row].error = ValueError(
                "BatchNorm needs more than one value per channel in training, but a batch has a single row"
            )
        for member in rows:
            if member.error is None:
                member.advance()
        left = [row for row, member in enumerate(rows) if member.batch is None]
        if left:
            for row, finite in zip(left, stack.leave(left), strict=True):
                if rows[row].error is None:
                    rows[row].finish(finite)
            stay = [row for row, member in enumerate(rows) if member.batch is not None]
            sums.keep(stay)
            rows[:] = [rows[row] for row in stay]


def _batch(member: Member) -> Batch:
    assert member.batch is not None
    return member.batch


class StackSums:
    """Sums of the terms, one row per client; see `EpochSums`."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)
        self._sums: dict[str, Tensor] = {}
        self._read: dict[str, list[float]] = {}
        self._ended: set[int] = set()

    def of(self, member: Member) -> _OwnSums:
        """One client's row."""
        return _OwnSums(self, member)

    def add(self, terms: Terms) -> None:
        """Adds the terms (clients,) of one step."""
        if len(self._ended) == len(self._members):
            self._sums = {}
        elif self._ended:
            index = torch.tensor(sorted(self._ended))
            self._sums = {name: total.index_fill(0, index.to(total.device), 0) for name, total in self._sums.items()}
        self._ended, self._read = set(), {}
        for name, value in terms.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def take(self, member: Member, steps: int) -> dict[str, float]:
        """One client's means; its next step starts a new epoch."""
        if not self._read:
            self._read = {name: total.tolist() for name, total in self._sums.items()}
        row = self._members.index(member)
        self._ended.add(row)
        return {name: totals[row] / steps for name, totals in self._read.items()}

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these rows only."""
        self._ended = {new for new, old in enumerate(rows) if old in self._ended}
        self._members = [self._members[row] for row in rows]
        self._read = {}
        index = torch.tensor(rows, dtype=torch.int64)
        self._sums = {name: total[index.to(total.device)] for name, total in self._sums.items()}


@dataclass(frozen=True)
class _OwnSums:
    sums: StackSums
    member: Member

    def take(self, steps: int) -> dict[str, float]:
        """See `Sums.take`."""
        return self.sums.take(self.member, steps)


# -- what must be equal ---------------------------------------------------------------------------------------------


def _by_loss(members: Sequence[Member]) -> dict[Any, list[Member]]:
    groups: dict[Any, list[Member]] = {}
    for member in members:
        try:
            method, _ = _parts(member.work.loss, member.module)
        except TogetherError as error:
            member.error = error
            continue
        groups.setdefault(method, []).append(member)
    return groups


def _parts(loss: Callable[..., Any], module: ClientModule) -> tuple[Any, tuple[Any, ...]]:
    """The function of a loss that is a method of the module or a partial of one, and the arguments given already."""
    args: tuple[Any, ...] = ()
    while isinstance(loss, partial):
        args, loss = (*loss.args, *sorted(loss.keywords.items()), *args), loss.func
    if getattr(loss, "__self__", None) is not module:
        raise TogetherError(
            f"the loss of {type(module).__name__} must be a method of the module, or functools.partial of one, to be "
            f"trained together with other clients, not {getattr(loss, '__qualname__', loss)!r}"
        )
    return loss.__func__, args  # type: ignore[attr-defined]


def _common_optimizer(group: Sequence[Member]) -> torch.optim.Optimizer:
    """The first member's optimiser, after checking that all members train in the same way."""
    first = group[0]
    args = _parts(first.work.loss, first.module)[1]
    optimizer = first.module.local_optimizer()
    check_elementwise(optimizer)
    settings = _settings(optimizer)
    for other in group[1:]:
        who = f"{first.ctx.who} and {other.ctx.who}"
        if not same(args, _parts(other.work.loss, other.module)[1]):
            raise TogetherError(f"{who} cannot train together: the arguments of their loss differ")
        if first.module.max_grad_norm != other.module.max_grad_norm:
            raise TogetherError(f"{who} cannot train together: max_grad_norm differs")
        if settings != (theirs := _settings(other.module.local_optimizer())):
            raise TogetherError(f"{who} cannot train together: their optimisers differ, {settings} and {theirs}")
        for name in sorted(first.changed.keys() | other.changed.keys()):
            if not same(first.changed.get(name), other.changed.get(name)):
                raise TogetherError(
                    f"{who} cannot train together: their actions set {type(first.module).__name__}.{name} to different "
                    "values; a loss gets such values in its batch, as an argument, or from a buffer"
                )
    return optimizer


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raises `TogetherError` for an optimiser whose steps are not made element by element."""
    if type(optimizer) not in ELEMENTWISE:
        raise TogetherError(
            f"optimiser {type(optimizer).__name__} cannot train several clients at once; allowed are the element-wise "
            f"{', '.join(kind.__name__ for kind in ELEMENTWISE)}; use fedclust.InProcess or fedclust.Processes"
        )


def _settings(optimizer: torch.optim.Optimizer) -> list[Any]:
    groups = [
        {name: value for name, value in group.items() if name != "params"} | {"tensors": len(group["params"])}
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, *groups]


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors and arrays included; what cannot be compared is not."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False
