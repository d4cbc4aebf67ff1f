"""FLAMECHE's client: a classifier that describes its rows by a random network and finds its own cluster."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedclust.clustering.checks import prefix
from fedclust.clustering.mixtures import MIXTURES, Metadata
from fedclust.federation.client import action
from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message, read_int, read_tensor
from fedclust.random import seed_for, seeded
from lightning_modules.classifier import Classifier
from lightning_modules.summing import answer


class FLAMECHEClient(Classifier):
    """A client with metadata: class-wise means of its features under a random network like its own, before its head.

    See `Classifier` for the arguments.
    """

    @action
    def describe_metadata(self, message: Message, ctx: ClientContext) -> Message:
        """Computes the metadata, once; tells their sufficient statistics or, where sums are protected, their shape."""
        if message["reveal"] and "metadata/blocks" not in ctx.state:
            ctx.state |= _entries(self.metadata(ctx))
        statistics = MIXTURES[str(message["mixture"])].statistics(self._known(ctx))
        return {"statistics": statistics} if message["reveal"] else {"shape": torch.tensor(statistics.shape)}

    @action
    def locate(self, message: Message, ctx: ClientContext) -> Message:
        """E-step: the nearest component of every start and the distance to it."""
        costs = MIXTURES[str(message["mixture"])].costs(self._known(ctx), read_tensor(message, "parameters").double())
        errors, slots = costs.min(dim=1)
        return {"slots": slots, "errors": errors}

    @action
    def contribute(self, message: Message, ctx: ClientContext) -> Message:
        """One step of a protected sum: the statistics out of the slots counted so far, into those of the E-step."""

        def change() -> Tensor:
            statistics = MIXTURES[str(message["mixture"])].statistics(self._known(ctx))
            before, after = read_tensor(message, "counted").tolist(), read_tensor(message, "target").tolist()
            moved = torch.zeros(len(after), read_int(message, "components"), *statistics.shape, dtype=torch.float64)
            for start, (old, new) in enumerate(zip(before, after, strict=True)):
                if old >= 0:
                    moved[start, old] -= statistics
                moved[start, new] += statistics
            return moved.flatten()

        return answer(message, ctx, change)

    def _known(self, ctx: ClientContext) -> Metadata:
        """The metadata; what the server was not told stays in the vault, and is computed again after a resume."""
        if "metadata/blocks" not in ctx.state and "metadata/blocks" not in ctx.vault:
            ctx.vault |= _entries(self.metadata(ctx))
        kept = ctx.state if "metadata/blocks" in ctx.state else ctx.vault
        return Metadata(read_tensor(kept, "metadata/blocks"), read_tensor(kept, "metadata/counts"))

    def metadata(self, ctx: ClientContext) -> Metadata:
        """Class-wise means of the client's training rows.

        Raises:
            ValueError: Naming the client, if it has no row.
        """
        table = ctx.data.train
        if not len(table):
            raise ValueError(f"{prefix(ctx.who)}a client without rows cannot be described")
        assert self.n_classes is not None
        features, labels = self.random_features(table.x, ctx.seed), self._labels(table)
        counts = torch.bincount(labels, minlength=self.n_classes)
        sums = torch.zeros(self.n_classes, features.shape[1], dtype=torch.float64)
        sums.index_add_(0, labels, features.double())
        return Metadata((sums / counts.clamp(min=1)[:, None]).float(), counts)

    @torch.no_grad()
    def random_features(self, x: Tensor, seed: int) -> Tensor:
        """Features (n, d) of the network before its last Linear, under Kaiming weights drawn from the run's seed."""
        with seeded(seed_for(seed, "extractor network")):  # a new one: nothing of what was trained may remain in it
            extractor = self.new_network().cpu().float().eval()
        layers = [layer for layer in extractor.modules() if isinstance(layer, nn.Linear)]
        with seeded(seed_for(seed, "extractor")):
            for layer in extractor.modules():
                if isinstance(layer, nn.Linear | nn.Conv2d):
                    nn.init.kaiming_normal_(layer.weight)
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)
        found: list[Tensor] = []
        layers[-1].register_forward_pre_hook(lambda layer, inputs: found.append(inputs[0].flatten(1)))
        for chunk in torch.split(x, 1024):
            extractor(chunk)
        return torch.cat(found)


def _entries(metadata: Metadata) -> Message:
    return {"metadata/blocks": metadata.blocks, "metadata/counts": metadata.counts}
