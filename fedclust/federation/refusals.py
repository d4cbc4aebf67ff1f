"""Trainer flags that cannot work when an epoch is a round, refused with a sentence of our own."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from pytorch_lightning.trainer.states import TrainerFn

from fedclust.directions import better
from fedclust.federation.algorithm import Algorithm
from fedclust.federation.client import ClientModule
from fedclust.federation.context import PRECISIONS

# By name, because not every version of Lightning has all of them.
_OF_AN_OPTIMISER = (
    "BackboneFinetuning",
    "BaseFinetuning",
    "BatchSizeFinder",
    "GradientAccumulationScheduler",
    "LearningRateFinder",
    "StochasticWeightAveraging",
    "WeightAveraging",
)


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
        (bool(trainer.overfit_batches), "trainer.overfit_batches: use a smaller data source or partition instead"),
        (
            trainer.val_check_interval not in (1, 1.0),
            "trainer.val_check_interval: a round is the smallest step; use trainer.check_val_every_n_epoch",
        ),
        (bool(getattr(trainer, "barebones", False)), "trainer.barebones: the loop needs logging for its metrics"),
        *_rounds(trainer),
        *_without_batches(trainer),
        *_wrong_callbacks(trainer),
    ]
    refused = [text for wrong, text in reasons if wrong]
    if refused:
        raise ValueError("these Trainer flags do not work with federated rounds. " + "; ".join(refused))


def _ends_by_itself(trainer: Any) -> bool:
    return any(isinstance(callback, EarlyStopping | Timer) for callback in trainer.callbacks)


def _rounds(trainer: Any) -> list[tuple[bool, str]]:
    """A fit needs rounds, and an end."""
    if trainer.state.fn != TrainerFn.FITTING:
        return []
    return [
        (trainer.max_epochs == 0, "trainer.max_epochs is 0: a run needs at least one round"),
        (
            trainer.max_epochs == -1 and not _ends_by_itself(trainer),
            "trainer.max_epochs -1 never ends; give a number of rounds, trainer.max_time, or an EarlyStopping callback",
        ),
        (
            trainer.limit_train_batches < 1,
            f"trainer.limit_train_batches {trainer.limit_train_batches:g}: a round is one batch; set cohort_size or "
            "participation of the loop",
        ),
    ]


def _without_batches(trainer: Any) -> list[tuple[bool, str]]:
    """A command that only evaluates needs something to evaluate."""
    flags = {TrainerFn.VALIDATING: "val", TrainerFn.TESTING: "test", TrainerFn.PREDICTING: "predict"}
    part = flags.get(trainer.state.fn)
    if part is None:
        return []
    limit = getattr(trainer, f"limit_{part}_batches")
    return [(limit == 0, f"trainer.limit_{part}_batches is 0: there would be nothing to do")]


def _wrong_callbacks(trainer: Any) -> list[tuple[bool, str]]:
    found = [(_acts_on_an_optimiser(callback), type(callback).__name__) for callback in trainer.callbacks]
    blind = not trainer.loggers and any(isinstance(one, LearningRateMonitor) for one in trainer.callbacks)
    where = "acts on an optimizer of the Trainer, but those are in the clients' loops"
    return [
        *((wrong, f"trainer.callbacks: {name} {where}") for wrong, name in found),
        (blind, "trainer.callbacks: LearningRateMonitor needs a logger; set trainer.logger"),
    ]


def _acts_on_an_optimiser(callback: Any) -> bool:
    return any(_is_lightnings(kind) and kind.__name__ in _OF_AN_OPTIMISER for kind in type(callback).__mro__)


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("pytorch_lightning", "lightning")


def check_actions(algorithm: Algorithm, client: ClientModule) -> None:
    """Raises ValueError for a client module that lacks what the method asks of its clients."""
    missing = sorted(set(algorithm.client_actions) - set(client.actions()))
    if missing:
        raise ValueError(
            f"{type(client).__name__} is no client of {type(algorithm).__name__}, which asks for {', '.join(missing)}: "
            f"use {algorithm.client_class or 'the client module of that method'}"
        )


def check_monitors(trainer: Any, names: frozenset[str], validation_rows: int) -> None:
    """Raises ValueError for a callback that monitors a metric which will not exist; lists those that will.

    Args:
        trainer: The Trainer with its callbacks.
        names: Metrics that will exist; empty if that is not known.
        validation_rows: Rows to validate on, all clients together.
    """
    # Those that choose and stop first: others, such as a progress bar, only follow them.
    for callback in sorted(trainer.callbacks, key=lambda one: not isinstance(one, EarlyStopping | ModelCheckpoint)):
        monitor = getattr(callback, "monitor", None)
        if not isinstance(monitor, str):
            continue
        kind = type(callback).__name__
        if names and monitor not in names:
            raise ValueError(f"{kind} monitors {monitor!r}, which will not exist; there are {', '.join(sorted(names))}")
        # "min" is what Lightning takes where nothing is said; "max" was asked for.
        unsaid = isinstance(callback, EarlyStopping | ModelCheckpoint) and callback.mode == "min"
        if unsaid and better(monitor) == "max":
            raise ValueError(
                f"{kind} monitors {monitor!r} with mode 'min', which selects the worst round; set mode to 'max'"
            )
        # Its own class only: a run keeps its best round by a validation metric, or the last one where there is none.
        strict = getattr(callback, "strict", True)
        if monitor.startswith("val/") and type(callback) in (EarlyStopping, ModelCheckpoint) and strict:
            if not validation_rows:
                raise ValueError(
                    f"{kind} monitors {monitor!r}, but there are no validation rows: set data.val_fraction"
                )
            if trainer.limit_val_batches == 0:
                raise ValueError(f"{kind} monitors {monitor!r}, but trainer.limit_val_batches is 0")
