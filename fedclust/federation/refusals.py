"""Trainer flags that cannot work when an epoch is a round, refused with a sentence of our own."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.callbacks import EarlyStopping, Timer
from pytorch_lightning.trainer.states import TrainerFn

from fedclust.federation.context import PRECISIONS


def refuse_unusable_flags(trainer: Any) -> None:
    """Raises ValueError for Trainer flags that a federated loop cannot honour; says what to use instead.

    Args:
        trainer: The `pytorch_lightning.Trainer` that is about to run a `FederatedLoop`.
    """
    reasons = [
        (
            trainer.gradient_clip_val is not None,
            "trainer.gradient_clip_val: clipping belongs to the clients' local loops; set max_grad_norm of the client "
            "module",
        ),
        (
            trainer.accumulate_grad_batches != 1,
            "trainer.accumulate_grad_batches: batches belong to the clients' local loops; set batch_size of the client "
            "module",
        ),
        (
            trainer.world_size > 1,
            f"trainer.devices/strategy: {trainer.world_size} processes would each train every client; use devices=1",
        ),
        (
            str(trainer.precision) not in PRECISIONS,
            f"trainer.precision {trainer.precision!r}: weights are exchanged and averaged in float32; allowed are "
            f"{', '.join(PRECISIONS)}",
        ),
        (
            trainer.fit_loop.max_steps not in (-1, None) and not trainer.fast_dev_run,
            "trainer.max_steps: a round is an epoch; set trainer.max_epochs to the number of rounds",
        ),
        (
            trainer.state.fn == TrainerFn.FITTING and trainer.max_epochs == 0,
            "trainer.max_epochs is 0: a run needs at least one round",
        ),
        (
            trainer.state.fn == TrainerFn.FITTING and trainer.max_epochs == -1 and not _ends_by_itself(trainer),
            "trainer.max_epochs -1 never ends; give a number of rounds, trainer.max_time, or an EarlyStopping callback",
        ),
        (bool(trainer.overfit_batches), "trainer.overfit_batches: use a smaller data source or partition instead"),
        (
            trainer.val_check_interval not in (1, 1.0),
            "trainer.val_check_interval: a round is the smallest step; use trainer.check_val_every_n_epoch",
        ),
        (bool(getattr(trainer, "barebones", False)), "trainer.barebones: the loop needs logging for its metrics"),
    ]
    refused = [text for wrong, text in reasons if wrong]
    if refused:
        raise ValueError("these Trainer flags do not work with federated rounds. " + "; ".join(refused))


def _ends_by_itself(trainer: Any) -> bool:
    return any(isinstance(callback, EarlyStopping | Timer) for callback in trainer.callbacks)


def check_monitors(trainer: Any, names: frozenset[str]) -> None:
    """Raises ValueError for a callback that monitors a metric which will not exist; lists those that will.

    Args:
        trainer: The Trainer with its callbacks.
        names: Metrics that will exist; empty if that is not known.
    """
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if names and isinstance(monitor, str) and monitor not in names:
            kind = type(callback).__name__
            raise ValueError(f"{kind} monitors {monitor!r}, which will not exist; there are {', '.join(sorted(names))}")
