"""FMCL's client: a classifier that first tells the class-wise signature of its rows under a frozen encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedclust.clustering.signatures import signature
from fedclust.data.encoded import Encoder, encoded_rows
from fedclust.data.feature_cache import AUTO, FeatureCache
from fedclust.federation.checkpoint import plain_arguments
from fedclust.federation.client import action
from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message
from lightning_modules.classifier import Classifier, NetworkName

_NEEDED = {
    "encode": "encode(x), the features of images (n, d) float32",
    "fingerprint": "fingerprint, a property of its class that gives a text that changes whenever the features do",
    "init_args": 'init_args, a dict of the plain arguments that it was made with such as {"size": 8}, or {}: '
    "checkpoints name it by them",
}


class FMCLClient(Classifier):
    """A client with a signature.

    Args:
        encoder: Frozen encoder whose features make the signature: one of `lightning_modules.encoders`, or an object of
            your own with `encode(x)`, `fingerprint` and `init_args`. None takes the rows themselves, such as those of
            a source that is seen through an encoder already.
        network: "cnn", "lenet5", "small_cnn", "resnet10", "mlp" or "linear"; see `Classifier`.
        lr: Learning rate of SGD.
        momentum: Momentum of SGD.
        batch_size: Rows per batch.
        max_grad_norm: Largest norm of a local step's gradient; None does not clip.
        cache_dir: Where the encoder's features are kept: "auto" is ``$FEDCLUST_CACHE``, else ``~/.cache/fedclust``;
            None keeps none.

    Raises:
        ValueError: For an argument outside its range, or an encoder that lacks something; names it.
    """

    def __init__(
        self,
        encoder: Encoder | None = None,
        network: NetworkName = "cnn",
        lr: float = 0.01,
        momentum: float = 0.0,
        batch_size: int = 64,
        max_grad_norm: float | None = None,
        cache_dir: str | None = AUTO,
    ) -> None:
        _check_encoder(encoder)
        super().__init__(network, lr, momentum, batch_size, max_grad_norm)
        self.save_hyperparameters()
        # In a tuple, so that its weights are no parameters of this module: they are neither trained nor exchanged.
        self._encoder = (encoder,)
        self.cache = FeatureCache(cache_dir)

    @action
    def describe_classes(self, message: Message, ctx: ClientContext) -> Message:
        """Mean feature and share of every class that the client holds; see `fedclust.clustering.signatures`."""
        table, encoder = ctx.data.train, self._encoder[0]
        if encoder is None:
            features = table.x.flatten(1)
        else:
            # Device and threads can change the last bits: a run with others makes its own features.
            place = f"{encoder.fingerprint} {getattr(encoder, 'device', 'cpu')} {torch.get_num_threads()}"
            features = encoded_rows(ctx.who, table.x.cpu(), encoder, place, self.cache)
        found = signature(features, self._labels(table), ctx.who)
        return {"classes": found.classes, "means": found.means.float(), "weights": found.weights}


def _check_encoder(encoder: Any) -> None:
    """Raises ValueError, before anything is encoded, for what checkpoints or the grouping could not use later."""
    if encoder is None:
        return
    # Loading looks at the class, which must therefore have the first two.
    places = {"encode": type(encoder), "fingerprint": type(encoder), "init_args": encoder}
    missing = [text for name, text in _NEEDED.items() if not hasattr(places[name], name)]
    if isinstance(encoder, type):
        raise ValueError(f"encoder must be an encoder, not the class {encoder.__name__}: write {encoder.__name__}()")
    if isinstance(encoder, str) or len(missing) == len(_NEEDED):
        raise ValueError(f"encoder must be an encoder such as those of lightning_modules.encoders, got {encoder!r}")
    if missing:
        raise ValueError(f"encoder {type(encoder).__name__} lacks " + "; ".join(missing))
    try:
        arguments = encoder.init_args
        if not isinstance(arguments, Mapping):
            raise TypeError(f"it is a {type(arguments).__name__}")
        plain_arguments(arguments)
    except TypeError as error:
        raise ValueError(f"encoder {type(encoder).__name__} needs {_NEEDED['init_args']}; here {error}") from error
