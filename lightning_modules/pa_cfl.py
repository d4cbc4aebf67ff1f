"""PA-CFL's user: everything that a user reveals is in the replies of the actions below, keyed by who receives it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedclust.federation.client import action
from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message, any_tensors_under, read_int, read_number, read_tensor, with_prefix
from fedclust.privacy.clipping import l2_norm
from fedclust.privacy.importance import join_important, split_important, top_k_indices
from fedclust.privacy.laplace import randomise
from fedclust.privacy.randomness import random_source
from lightning_modules.classifier import Classifier, NetworkName

# What a user's vault holds within a round only.
_OF_A_ROUND = ("gradient", "ranking", "important", "less")


class PrivateAdaptiveClient(Classifier):
    """A user with a model of its own of d trainable parameters.

    Keys of replies start with the receiver: `ms/` for the management server, `as/` for the aggregation server. Beside
    these, whoever runs the training gets the mean loss (`term/loss`) and, from evaluations, counts of right and wrong
    predictions per class.

    Args:
        network: "cnn", "lenet5", "small_cnn", "resnet10", "mlp" or "linear"; see `Classifier`.
        lr: Learning rate η of SGD; also scales the pseudo-gradient and the returned aggregate.
        momentum: Momentum of SGD.
        batch_size: Rows per batch.
        max_grad_norm: Largest norm of a local step's gradient; None does not clip.
    """

    def __init__(
        self,
        network: NetworkName = "cnn",
        lr: float = 0.01,
        momentum: float = 0.0,
        batch_size: int = 64,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(network, lr, momentum, batch_size, max_grad_norm)
        self.save_hyperparameters()

    # -- the phases of a round ------------------------------------------------------------------------------------

    @action
    def describe(self, message: Message, ctx: ClientContext) -> Message:
        """Sec. 5.2: local epochs, the pseudo-gradient g = (θ before − θ after) / η, and its k largest coordinates.

        Message: `weights/…` to start from at the first time; `epochs`; `k`; `reveal_gradient`. Reply: `ms/sequence`
        (k,) int64, `ms/n_rows`, `term/…`, and `ms/gradient` (d,) float32 where it shall be revealed.

        Raises:
            ValueError: If g is not finite.
        """
        self.load_own(message, ctx.state)
        if not self.has_own(ctx.state):
            self.keep_own(ctx.state)
        before = self.flat()
        fit = self.learn(ctx, read_int(message, "epochs"))
        gradient = (before - self.flat()) / self.lr
        # A secret: it must be in no checkpoint, not even after a round that failed.
        ctx.vault |= {"gradient": gradient, **with_prefix("buffers", self.buffer_tensors())}
        reply: Message = {
            "ms/sequence": top_k_indices(gradient, read_int(message, "k"), who=ctx.who),
            "ms/n_rows": len(ctx.data.train),
        }
        if message["reveal_gradient"]:
            reply["ms/gradient"] = gradient
        return {**reply, **with_prefix("term", dict(fit.terms))}

    @action
    def measure(self, message: Message, ctx: ClientContext) -> Message:
        """Sec. 5.5: keeps π^g and tells the norm of the less important part, from which the MS takes Φ.

        Message: `ranking` (k,) int64. Reply: `ms/norm`.
        """
        ranking = read_tensor(message, "ranking")
        important, less = split_important(read_tensor(ctx.vault, "gradient"), ranking)
        del ctx.vault["gradient"]
        ctx.vault |= {"ranking": ranking, "important": important, "less": less}
        return {"ms/norm": l2_norm(less, ctx.who)}

    @action
    def protect(self, message: Message, ctx: ClientContext) -> Message:
        """Sec. 5.5: important values in the order of π^g to the AS; the rest, clipped and randomised, to the MS.

        Message: `private`; where it is true, `bound` Φ, `epsilon` ε₀ and `noise`. Reply: `as/important` (k,),
        `as/n_rows`, `as/buffers/…`, and `ms/less` (d − k,); where `private` is false the rest goes to the AS as it is,
        as `as/less`.
        """
        less = read_tensor(ctx.vault, "less")
        reply: Message = {"as/important": read_tensor(ctx.vault, "important"), "as/n_rows": len(ctx.data.train)}
        reply |= with_prefix("as/buffers", any_tensors_under("buffers", ctx.vault))
        if not message["private"]:
            return {**reply, "as/less": less}
        source = random_source(str(message["noise"]), ctx.seed, ctx.round, ctx.id, "laplace")
        bound, epsilon = read_number(message, "bound"), read_number(message, "epsilon")
        return {**reply, "ms/less": randomise(less, bound, epsilon, source, who=ctx.who)}

    @action
    def absorb(self, message: Message, ctx: ClientContext) -> Message:
        """Sec. 5.7: θ ← θ − η · aggregate, after π^g has put the aggregate back into the order of the coordinates.

        Message: `aggregate` (d,), important coordinates first, and `buffers/…`. Reply: nothing.
        """
        aggregate, ranking = read_tensor(message, "aggregate"), read_tensor(ctx.vault, "ranking")
        step = join_important(aggregate[: len(ranking)], aggregate[len(ranking) :], ranking, len(aggregate))
        self.load_own(message, ctx.state)
        self.load_flat(self.flat() - self.lr * step)
        self.load_buffers(any_tensors_under("buffers", message))
        self.keep_own(ctx.state)
        for name in [name for name in ctx.vault if name in _OF_A_ROUND or name.startswith("buffers/")]:
            del ctx.vault[name]
        return {}

    # -- the model as one vector ----------------------------------------------------------------------------------

    def flat(self) -> torch.Tensor:
        """All trainable parameters as one float32 vector (d,) on the CPU."""
        return torch.cat([p.detach().flatten().float().cpu() for p in self.parameters() if p.requires_grad])

    @torch.no_grad()
    def load_flat(self, vector: torch.Tensor) -> None:
        """Copies a vector (d,) back into the trainable parameters."""
        start = 0
        for parameter in self.parameters():
            if parameter.requires_grad:
                part = vector[start : start + parameter.numel()]
                parameter.copy_(part.view(parameter.shape))
                start += parameter.numel()

    @torch.no_grad()
    def load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Copies values into the buffers of these names."""
        own = self.exchanged()
        for name, value in buffers.items():
            own[name].copy_(value)

    def buffer_tensors(self) -> dict[str, torch.Tensor]:
        """A copy of the BatchNorm buffers, by name; they are exchanged without noise."""
        parameters = {name for name, _ in self.named_parameters()}
        return {name: value for name, value in self.snapshot().items() if name not in parameters}
