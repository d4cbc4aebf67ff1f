"""Weighted average of model states: the server's half of federated averaging."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedclust.federation.message import Value, read_number


def check_weights(weights: Sequence[float], names: Sequence[str]) -> float:
    """Check the clients' weights and return their sum.

    Raises:
        ValueError: naming the clients, if a weight is negative or not finite, or all are 0.
    """
    for name, weight in zip(names, weights, strict=True):
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise ValueError(f"{name}: its weight must be a number, finite and at least 0, got {weight!r}")
    listed = ", ".join(f"{name}: {weight:g}" for name, weight in zip(names, weights, strict=True))
    if any(not math.isfinite(weight) or weight < 0 for weight in weights):
        raise ValueError(f"weights must be finite and at least 0, and the total weight above 0, got {listed}")
    try:
        total = math.fsum(weights)
    except OverflowError:
        raise ValueError(f"the weights are too large to be added: {listed}") from None
    if total == 0:
        raise ValueError(f"total weight is 0, so there is nothing to average ({listed or 'no client replied'})")
    return total


def weighted_average(
    states: Sequence[Mapping[str, Tensor]], weights: Sequence[float], *, names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Average model states by weight; see :class:`WeightedAverage` for the rules.

    Args:
        states: one state dict per client.
        weights: one weight per client, such as its number of rows.
        names: what error messages call the clients; default ``client 0``, ``client 1``, ...

    Raises:
        ValueError: as :class:`WeightedAverage`, or if the lists differ in length.
    """
    names = [f"client {i}" for i in range(len(states))] if names is None else names
    if not len(states) == len(weights) == len(names):
        raise ValueError(f"got {len(states)} states, {len(weights)} weights and {len(names)} names")
    check_weights(weights, names)
    average = WeightedAverage()
    for state, weight, name in zip(states, weights, names, strict=True):
        average.add(state, weight, name)
    return average.result()


class WeightedAverage:
    """Running weighted average of model states, holding one state in memory however many are added.

    * Floating-point entries, BatchNorm's running statistics included, are averaged in float64 on the CPU and returned
      in their own type (bfloat16 in, bfloat16 out). A single state, or equal states, come back bit for bit.
    * Integer and boolean entries, such as BatchNorm's batch counter, keep type and shape and take the largest value.
    * A state of weight 0 must fit the others but does not count.
    * Floating-point sums depend on the order in the last bits of float64: add in the order of client ids for equal
      bits from run to run.

    States that are added are never modified, and nothing of them is shared with the result.
    """

    def __init__(self) -> None:
        self._mean: dict[str, Tensor] = {}
        self._like: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._first = ""
        self._total = 0.0
        self._ignored: list[str] = []
        self._count = 0

    def add(self, state: Mapping[str, Tensor], weight: float, name: str | None = None) -> None:
        """Take in one client's state.

        Args:
            state: name of each entry → tensor.
            weight: finite, at least 0.
            name: what error messages call the client.

        Raises:
            ValueError: naming the client, for a bad weight, entries that differ from the first client's in name, shape
                or type, or (at a weight above 0) NaN or infinite values. The average is then unchanged.
        """
        name = f"client {self._count}" if name is None else name
        if weight != 0:
            check_weights([weight], [name])
        weight = float(weight)
        self._check_layout(state, name)
        if weight > 0:
            _check_values(state, name)
        if not self._like:
            self._like = {key: (value.shape, value.dtype) for key, value in state.items()}
            self._first = name
        self._count += 1
        if weight == 0:
            self._ignored.append(name)
            return
        share = weight / (self._total + weight)
        self._total += weight
        for key, value in state.items():
            self._fold(key, value.detach().to("cpu"), share)

    def result(self) -> dict[str, Tensor]:
        """The average so far, as new tensors on the CPU.

        Raises:
            ValueError: naming the clients, if the total weight is 0, or the entry that is beyond its type's range.
        """
        if self._total == 0:
            check_weights([0.0] * len(self._ignored), self._ignored)
        average = {key: self._mean[key].to(dtype, copy=True) for key, (_, dtype) in self._like.items()}
        for key, value in average.items():
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise ValueError(f"the average of {key} is beyond the range of {value.dtype}")
        return average

    def _fold(self, key: str, value: Tensor, share: float) -> None:
        real = value.is_floating_point()
        if key not in self._mean:
            self._mean[key] = value.to(torch.float64 if real else value.dtype, copy=True)
        elif real:
            # Moving the mean, not summing and dividing: equal states then stay exactly as they are.
            self._mean[key] += share * (value.to(torch.float64) - self._mean[key])
        else:
            self._mean[key] = torch.maximum(self._mean[key], value)

    def _check_layout(self, state: Mapping[str, Tensor], name: str) -> None:
        if not state:
            raise ValueError(f"{name}: the state is empty")
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.is_complex() or value.is_quantized:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{name}: {key} must be a real tensor, got {kind}")
        if not self._like:
            return
        missing, extra = self._like.keys() - state.keys(), state.keys() - self._like.keys()
        if missing or extra:
            raise ValueError(
                f"{name}: entries differ from {self._first}'s: missing {sorted(missing)}, unexpected {sorted(extra)}"
            )
        for key, (shape, dtype) in self._like.items():
            if state[key].shape != shape or state[key].dtype != dtype:
                raise ValueError(
                    f"{name}: {key} is {tuple(state[key].shape)} {state[key].dtype}, "
                    f"but {self._first} has {tuple(shape)} {dtype}"
                )


def _check_values(state: Mapping[str, Tensor], name: str) -> None:
    for key, value in state.items():
        if value.is_floating_point():
            bad = int((~torch.isfinite(value)).sum())
            if bad:
                raise ValueError(f"{name}: {bad} of {value.numel()} values of {key} are NaN or infinite")


class TermMeans:
    """Mean of every loss term `term/<name>` of the clients' replies, weighted by rows."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._rows = 0.0

    def add(self, reply: Mapping[str, Value], rows: float) -> None:
        """Takes one client's terms."""
        self._rows += rows
        for name in reply:
            if name.startswith("term/"):
                term = name.removeprefix("term/")
                self._sums[term] = self._sums.get(term, 0.0) + rows * read_number(reply, name)

    def metrics(self) -> dict[str, float]:
        """The means as `train/<name>`."""
        return {f"train/{name}": total / self._rows for name, total in self._sums.items()}
