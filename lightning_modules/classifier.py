"""A classifier as a client module: the supervised baseline's client, and the base of clustered methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import nn

from fedclust.checks import choice, non_negative, positive, positive_int
from fedclust.data.tables import Table
from fedclust.federation.batches import gathered, shuffled_batches
from fedclust.federation.client import Batch, ClientModule, LocalFit, Terms, action
from fedclust.federation.context import ClientContext, WorkContext
from fedclust.federation.errors import NonFiniteOutputsError
from fedclust.federation.message import Message, read_int, tensors_under, with_prefix
from fedclust.federation.padding import channels_last, mask_of, mean_cross_entropy
from fedclust.scores import class_confusion, roc_auc
from lightning_modules import networks
from lightning_modules.summing import answer

NetworkName = Literal["cnn", "lenet5", "small_cnn", "resnet10", "mlp", "linear"]
_NETWORKS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "cnn": networks.image_cnn,
    "lenet5": networks.lenet5,
    "small_cnn": networks.small_cnn,
    "resnet10": networks.resnet10,
    "mlp": networks.mlp,
    "linear": networks.linear,
}
_CHUNK = 1024
_OWN_MARK = "has_own"


class Classifier(ClientModule):
    """Trains a network with cross-entropy and SGD.

    Args:
        network: "cnn" (two 5×5 convolutions), "lenet5", "small_cnn" (for 8×8 images), "resnet10" (RGB images),
            "mlp", or "linear" for features.
        lr: Learning rate of SGD.
        momentum: Momentum of SGD.
        batch_size: Rows per batch; a client with fewer rows uses one batch of all its rows.
        max_grad_norm: Largest norm of a step's gradient; None does not clip.
    """

    draws_in_training = False
    honours_row_masks = True

    def __init__(
        self,
        network: NetworkName = "cnn",
        lr: float = 0.01,
        momentum: float = 0.0,
        batch_size: int = 64,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__()
        choice("network", network, tuple(_NETWORKS))
        self.network_name, self.lr = network, positive("lr", lr)
        self.momentum = non_negative("momentum", momentum)
        self.batch_size = positive_int("batch_size", batch_size)
        self.max_grad_norm = None if max_grad_norm is None else positive("max_grad_norm", max_grad_norm)
        self.n_classes: int | None = None
        self.input_shape: tuple[int, ...] | None = None
        self.save_hyperparameters()

    def build(self, input_shape: tuple[int, ...], n_classes: int | None) -> None:
        """Makes the network.

        Raises:
            ValueError: Without labels, or for rows that the network cannot take.
        """
        if n_classes is None:
            raise ValueError(f"{type(self).__name__} needs labels; this data has none")
        if (self.input_shape, self.n_classes) == (input_shape, n_classes):
            return
        self.input_shape, self.n_classes = input_shape, n_classes
        self.network = self.new_network()

    def new_network(self) -> nn.Module:
        """A network of this module's kind with fresh weights, images in channels_last; only after `build`."""
        assert self.input_shape is not None
        assert self.n_classes is not None
        network = self.make_network(self.input_shape, self.n_classes)
        return network.to(memory_format=torch.channels_last) if len(self.input_shape) == 3 else network

    def make_network(self, input_shape: tuple[int, ...], n_classes: int) -> nn.Module:
        """The network, from rows (n, *input_shape) to logits (n, n_classes); override it to train another one.

        Raises:
            ValueError: For rows that the network cannot take.
        """
        return _NETWORKS[self.network_name](input_shape, n_classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, fused where PyTorch has it for the device."""
        device = next(self.parameters()).device.type
        return torch.optim.SGD(
            self.parameters(), lr=self.lr, momentum=self.momentum, fused=device in ("cpu", "cuda")
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, classes), float32."""
        logits: torch.Tensor = self.network(channels_last(x))
        return logits.float()

    def training_step(self, batch: Batch, batch_idx: int) -> Terms:
        """Mean cross-entropy of one batch {"x", "y"}, float32."""
        return {"loss": mean_cross_entropy(self(batch["x"]), batch["y"], mask_of(batch, "x"))}

    # -- actions --------------------------------------------------------------------------------------------------

    @action
    def update(self, message: Message, ctx: ClientContext) -> Message:
        """Local epochs from the received weights (FedAvg)."""
        self.load_exchanged(tensors_under("weights", message))
        fit = self.learn(ctx, read_int(message, "epochs"))
        return {
            "n_rows": len(ctx.data.train),
            "n_steps": fit.n_steps,
            **with_prefix("term", dict(fit.terms)),
            **with_prefix("weights", self.snapshot()),
        }

    @action
    def update_kept(self, message: Message, ctx: ClientContext) -> Message:
        """Local epochs from the received weights; the result stays here, for a protected sum."""
        reply = self.update(message, ctx)
        ctx.vault |= with_prefix("trained", tensors_under("weights", reply))
        return {name: value for name, value in reply.items() if not name.startswith("weights/")}

    @action
    def contribute_weights(self, message: Message, ctx: ClientContext) -> Message:
        """One step of a protected sum of rows times weights, and rows."""

        def vector() -> torch.Tensor:
            rows = len(ctx.data.train)
            parts = [rows * value.double().flatten() for value in tensors_under("trained", ctx.vault).values()]
            return torch.cat([*parts, torch.tensor([float(rows)])])

        return answer(message, ctx, vector)

    @action
    def evaluate(self, message: Message, ctx: ClientContext) -> Message:
        """Counts over one split's rows under the received weights."""
        self.load_exchanged(tensors_under("weights", message))
        return self.scores(ctx.table(message), ctx)

    @action
    def assign(self, message: Message, ctx: ClientContext) -> Message:
        """Predicted class of every row of one split, and one minus its probability as the distance."""
        self.load_exchanged(tensors_under("weights", message))
        return self.predictions(ctx.table(message))

    @action
    def update_own(self, message: Message, ctx: ClientContext) -> Message:
        """Local epochs from the client's own weights, which stay with it (LocalOnly)."""
        self.load_own(message, ctx.state)
        fit = self.learn(ctx, read_int(message, "epochs"))
        self.keep_own(ctx.state)
        return {"n_rows": len(ctx.data.train), "n_steps": fit.n_steps, **with_prefix("term", dict(fit.terms))}

    @action
    def evaluate_own(self, message: Message, ctx: ClientContext) -> Message:
        """Counts over one split's rows under the client's own model; the initial one if it never took part."""
        self.load_own(message, ctx.state)
        return self.scores(ctx.table(message), ctx)

    @action
    def assign_own(self, message: Message, ctx: ClientContext) -> Message:
        """Predicted class of every row of one split under the client's own model."""
        self.load_own(message, ctx.state)
        return self.predictions(ctx.table(message))

    # -- pieces ---------------------------------------------------------------------------------------------------

    def load_own(self, message: Message, state: Message) -> None:
        """Loads the client's own model from its state, or the initial weights of the message if it has none yet."""
        self.load_exchanged(tensors_under("own", state) if self.has_own(state) else tensors_under("weights", message))

    @staticmethod
    def has_own(state: Message) -> bool:
        """Whether the client's state holds a model of its own already."""
        return _OWN_MARK in state

    def keep_own(self, state: Message) -> None:
        """Keeps the model in the client's state."""
        state |= {_OWN_MARK: True, **with_prefix("own", self.snapshot())}

    def learn(self, ctx: ClientContext, epochs: int) -> LocalFit:
        """Local epochs over the client's training rows."""
        x, y = ctx.data.train.x.to(ctx.device), self._labels(ctx.data.train).to(ctx.device)
        x = channels_last(x)
        rng = ctx.rng("batches")

        def batches(epoch: int) -> Iterator[Batch]:
            for rows in shuffled_batches(len(x), self.batch_size, rng):
                yield {"x": gathered((x, rows)), "y": gathered((y, rows))}

        return self.fit_locally(ctx, epochs, batches=batches)

    @torch.no_grad()
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of many rows in evaluation mode, on the CPU, chunk by chunk."""
        self.eval()
        device = next(self.parameters()).device
        with torch.autocast(device.type, enabled=False):
            return torch.cat([self(chunk.to(device)).cpu() for chunk in torch.split(x, _CHUNK)])

    def scores(self, table: Table, ctx: WorkContext) -> Message:
        """Number of rows, confusion counts (C, C) and, where it is defined, the area under the ROC.

        Args:
            table: Rows with labels; may be empty.
            ctx: Names the client and the round in errors.

        Raises:
            NonFiniteOutputsError: If the model gives NaN or infinite logits for any row.
        """
        assert self.n_classes is not None
        if not len(table):
            empty = torch.zeros(self.n_classes, self.n_classes, dtype=torch.int64)
            return {"n": 0, "confusion": empty, "auc": None}
        logits, y = self.logits(table.x), self._labels(table)
        if bad := int((~torch.isfinite(logits)).any(1).sum()):
            raise NonFiniteOutputsError(ctx.who, ctx.round, bad, len(table))
        confusion = class_confusion(y, logits.argmax(1), self.n_classes)
        return {"n": len(table), "confusion": confusion, "auc": roc_auc(y, logits.softmax(1))}

    def predictions(self, table: Table) -> Message:
        """Rows, predicted classes and distances of a table."""
        labels, distance = self.assignments(table.x)
        return {"rows": table.rows, "cluster": labels, "distance": distance}

    def assignments(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicted class (n,) int64 and one minus its probability (n,) float32 of every row."""
        if not len(x):
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        best, labels = self.logits(x).softmax(1).max(1)
        return labels, 1 - best

    def _labels(self, table: Table) -> torch.Tensor:
        if table.y is None:
            raise ValueError(f"{type(self).__name__} needs labels; this data has none")
        return table.y
