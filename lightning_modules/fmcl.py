"""FMCL's client: a classifier that first tells the class-wise signature of its rows under a frozen encoder."""

from __future__ import annotations

from fedclust.clustering.signatures import signature
from fedclust.data.encoded import Encoder
from fedclust.federation.client import action
from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message
from lightning_modules.classifier import Classifier, NetworkName


class FMCLClient(Classifier):
    """A client with a signature.

    Args:
        encoder: Frozen encoder whose features make the signature; None takes the rows themselves, such as those of a
            source that is seen through an encoder already.
        network: "cnn", "lenet5", "small_cnn", "resnet10", "mlp" or "linear"; see `Classifier`.
        lr: Learning rate of SGD.
        momentum: Momentum of SGD.
        batch_size: Rows per batch.
        max_grad_norm: Largest norm of a local step's gradient; None does not clip.
    """

    def __init__(
        self,
        encoder: Encoder | None = None,
        network: NetworkName = "cnn",
        lr: float = 0.01,
        momentum: float = 0.0,
        batch_size: int = 64,
        max_grad_norm: float | None = None,
    ) -> None:
        if isinstance(encoder, str) or (encoder is not None and not hasattr(encoder, "encode")):
            raise ValueError(f"encoder must be an encoder of lightning_modules.encoders or None, got {encoder!r}")
        super().__init__(network, lr, momentum, batch_size, max_grad_norm)
        self.save_hyperparameters()
        # In a tuple, so that its weights are no parameters of this module: they are neither trained nor exchanged.
        self._encoder = (encoder,)

    @action
    def describe_classes(self, message: Message, ctx: ClientContext) -> Message:
        """Mean feature and share of every class that the client holds; see `fedclust.clustering.signatures`."""
        table, encoder = ctx.data.train, self._encoder[0]
        features = table.x.flatten(1) if encoder is None else encoder.encode(table.x)
        found = signature(features, self._labels(table), ctx.who)
        return {"classes": found.classes, "means": found.means.float(), "weights": found.weights}
