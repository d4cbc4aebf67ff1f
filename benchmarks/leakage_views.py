"""What each party of PA-CFL sees of one user's gradient, and how an attacker with that view scores a dummy gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pa_cfl_users import dealt_by_hand, first_round
from torch import Tensor, nn

from fedclust import PrivateAdaptiveCFL
from fedclust.data.tables import Source
from fedclust.federation.message import Message, read_number, read_tensor
from lightning_modules.pa_cfl import PrivateAdaptiveClient

VIEWS = ("top_k", "as_order", "as_sorted", "ms")
# A noisy part says little: it may choose between dummies that fit the rest equally well, and no more.
_NOISE_WEIGHT = 0.01
Score = Callable[[Tensor], Tensor]


class SmoothClient(PrivateAdaptiveClient):
    """The same shapes with Sigmoid and average pooling, twice differentiable as in the attack's own paper."""

    def build(self, input_shape: tuple[int, ...], n_classes: int | None) -> None:
        """Makes the network and replaces what has kinks."""
        super().build(input_shape, n_classes)
        smooth = {nn.ReLU: nn.Sigmoid, nn.MaxPool2d: lambda: nn.AvgPool2d(2)}
        self.network = nn.Sequential(*(smooth.get(type(layer), lambda layer=layer: layer)() for layer in self.network))


@dataclass(frozen=True)
class Seen:
    """What the messages of one round hold of user 0, and what the servers themselves computed.

    Attributes:
        gradient: (d,) the truth.
        sequence: (k,) its largest coordinates, at the management server.
        ranking: (k,) π^g, which the management server computed.
        norm: Norm of the less important part, at the management server.
        bound: Φ, which the management server computed.
        noisy: (d − k,) randomised less important part, at the management server.
        important: (k,) values in the order of π^g, at the aggregation server.
        shuffled: (d − k,) shuffled less important part, at the aggregation server.
    """

    gradient: Tensor
    sequence: Tensor
    ranking: Tensor
    norm: float
    bound: float
    noisy: Tensor
    important: Tensor
    shuffled: Tensor


def observe(
    source: Source, rows: list[int], top_k: float, epsilon: float, seed: int, client: PrivateAdaptiveClient
) -> Seen:
    """Runs the first round of users with one image each, all in one shuffle group, and reads user 0's messages."""
    messages: dict[str, Message] = {"ms": {}, "as": {}}

    def watch(receiver: str, sender: str, message: Message) -> None:
        if sender == "client 0":
            messages[receiver] |= message
        elif (receiver, sender) == ("as", "ms"):
            messages["as"]["shuffled"] = message["less/0"]

    # One image, one epoch: one step, whose pseudo-gradient is the gradient. "l2" reveals it, as the truth; no view but
    # the first has it. Set afterwards, because the method refuses to be private and to reveal gradients.
    algorithm = PrivateAdaptiveCFL(
        round_epochs=1, top_k=top_k, epsilon=epsilon, pre_clustering=False, noise="simulated"
    )
    algorithm.similarity = "l2"
    algorithm.observer = watch
    data = dealt_by_hand(source, torch.tensor(rows).reshape(-1, 1).numpy(), seed)
    current = first_round(data, algorithm, client, "32-true", torch.get_num_threads())
    start = client.snapshot()
    current.describe()
    current.protect()
    client.load_exchanged(start)
    ms, aggregator = messages["ms"], messages["as"]
    return Seen(
        gradient=read_tensor(ms, "gradient"), sequence=read_tensor(ms, "sequence"),
        ranking=current.ms.ranking(current.k), norm=read_number(ms, "norm"), bound=current.ms.bound(),
        noisy=read_tensor(ms, "less"), important=read_tensor(aggregator, "important"),
        shuffled=read_tensor(aggregator, "shuffled"),
    )  # fmt: skip


def score(view: str, seen: Seen, epsilon: float, expected: Tensor) -> Score:
    """The loss that an attacker with this view minimises over dummy gradients (d,); see the benchmark's docstring.

    Args:
        view: "whole" or one of `VIEWS`.
        seen: The messages.
        epsilon: ε₀, which everybody knows.
        expected: (d,) sorted magnitudes that the attacker expects of any gradient.
    """
    if view == "whole":
        return lambda dummy: _misfit(dummy, seen.gradient)
    if view == "top_k":
        values = seen.gradient[seen.sequence]
        return lambda dummy: _misfit(dummy[seen.sequence], values)
    if view == "as_order":
        return _in_order(seen)
    if view == "as_sorted":
        return _sorted(seen)
    return _management(seen, epsilon, expected)


def _misfit(dummy: Tensor, target: Tensor) -> Tensor:
    return (dummy - target).square().sum() / target.square().sum()


def _noise_fit(dummy: Tensor, noisy: Tensor, scale: float) -> Tensor:
    """Laplace's log-likelihood ratio of a zero part and the dummy's."""
    return ((noisy - dummy).abs() - noisy.abs()).sum() / scale


def _in_order(seen: Seen) -> Score:
    k, scale = len(seen.important), float(seen.shuffled.abs().mean())  # the mean magnitude estimates the noise's scale

    def loss(dummy: Tensor) -> Tensor:
        return _misfit(dummy[:k], seen.important) + _NOISE_WEIGHT * _noise_fit(dummy[k:], seen.shuffled, scale)

    return loss


def _sorted(seen: Seen) -> Score:
    """A heuristic: `important` holds the values at π^g, which need not be the k largest of this user's gradient."""
    values = seen.important.sort().values

    def loss(dummy: Tensor) -> Tensor:
        largest = torch.topk(dummy.detach().abs(), len(values), sorted=False).indices
        return _misfit(dummy[largest].sort().values, values)

    return loss


def _management(seen: Seen, epsilon: float, expected: Tensor) -> Score:
    rest = torch.ones(len(seen.gradient), dtype=torch.bool)
    rest[seen.ranking] = False
    others = torch.nonzero(rest).flatten()
    profile = expected[: len(seen.sequence)]
    profile = profile / profile.norm()
    clip, scale = min(1.0, seen.bound / seen.norm), 2 * seen.bound / epsilon

    def loss(dummy: Tensor) -> Tensor:
        less = dummy[others]
        likeness = (dummy[seen.sequence].abs() * profile).sum() / dummy.norm()
        length = (less.norm() / seen.norm - 1).square()
        return 1 - likeness + length + _NOISE_WEIGHT * _noise_fit(clip * less, seen.noisy, scale)

    return loss
