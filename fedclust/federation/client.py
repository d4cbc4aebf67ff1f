"""Client modules: the client side of a method as a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedclust.federation.context import ClientContext, WorkContext
from fedclust.federation.local import Batch as Batch
from fedclust.federation.local import EpochSums, LocalRun, LocalWork
from fedclust.federation.local import LocalFit as LocalFit
from fedclust.federation.local import Terms as Terms
from fedclust.federation.message import Message
from fedclust.random import seed_for, seeded

F = TypeVar("F", bound=Callable[..., Any])


def action(function: F) -> F:
    """Marks a method `(self, message, ctx) -> Message` of a client module as one that the server may ask for.

    A subclass that overrides the method need not mark it again.
    """
    function.__fedclust_action__ = True  # type: ignore[attr-defined]
    return function


class ClientModule(pl.LightningModule):
    """Base of all client modules.

    A subclass defines `training_step`, which returns a loss or a dict of named terms with the key "loss", and methods
    marked with `@action`. It does not log by itself: under a plain Trainer this class logs the terms as `train/<name>`,
    so the same module trains centrally too.

    Attributes:
        max_grad_norm: Largest norm of a training step's gradient; None does not clip.
        draws_in_training: Whether a training step draws random numbers by itself (dropout does). PyTorch takes them
            from a generator of the whole process, so such modules train one at a time; False spares the wait.
        honours_row_masks: Whether the losses leave padded rows out, see `fedclust.federation.padding`; the backend
            `Vectorised` needs that where clients' batches differ in their numbers of rows.
    """

    max_grad_norm: float | None = None
    draws_in_training: bool = True
    honours_row_masks: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuses actions whose name PyTorch or Lightning uses, such as `train`: they would replace its method."""
        super().__init_subclass__(**kwargs)
        shadowing = [name for name in cls.actions() if hasattr(pl.LightningModule, name)]
        if shadowing:
            raise TypeError(
                f"{cls.__name__}: actions {shadowing} would replace methods of LightningModule; rename them"
            )

    # -- building -----------------------------------------------------------------------------------------------

    def build(self, input_shape: tuple[int, ...], n_classes: int | None) -> None:
        """Makes the layers whose sizes depend on the data; called before any training, more than once is harmless.

        Args:
            input_shape: Shape of one row.
            n_classes: Number of classes, or None without labels.
        """

    def initialize(self, seed: int) -> None:
        """Draws the initial weights from (seed, "init"), whatever was drawn before.

        Every layer that has `reset_parameters` is reset; parameters outside such layers stay as they were built.
        Override it to draw those too, or to keep weights that were loaded.
        """
        with seeded(seed_for(seed, "init")):
            for module in self.modules():
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if callable(reset):
                    reset()

    def configure_model(self) -> None:
        """Builds the layers from the data module under a plain Trainer."""
        trainer = self._trainer
        data = getattr(trainer, "datamodule", None)
        if data is not None and hasattr(data, "input_shape"):
            self.build(tuple(data.input_shape), data.n_classes)

    # -- what is exchanged --------------------------------------------------------------------------------------

    def exchanged(self) -> dict[str, torch.Tensor]:
        """The tensors that are exchanged: parameters and BatchNorm buffers, by name, detached but not copied."""
        # One walk over the layers, since this is asked several times per client and round: a parameter that several
        # layers share comes under its first name, as in `named_parameters`.
        parameters: dict[torch.Tensor, str] = {}
        buffers: dict[str, torch.Tensor] = {}
        for prefix, module in self.named_modules():
            start = f"{prefix}." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    parameters.setdefault(parameter, start + name)
            if isinstance(module, _BatchNorm):
                buffers |= {start + name: buffer for name, buffer in module.named_buffers(recurse=False)}
        return {**{name: parameter.detach() for parameter, name in parameters.items()}, **buffers}

    def snapshot(self) -> dict[str, torch.Tensor]:
        """A copy of `exchanged()` on the CPU."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.exchanged().items()}

    def load_exchanged(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies received tensors into the parameters and BatchNorm buffers.

        Raises:
            ValueError: If a name is missing or unknown, or a shape differs.
        """
        own = self.exchanged()
        if own.keys() != tensors.keys():
            missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
            raise ValueError(f"received weights do not fit {type(self).__name__}: missing {missing}, unknown {unknown}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                if own[name].shape != tensor.shape:
                    raise ValueError(
                        f"received weight {name!r} has shape {tuple(tensor.shape)}, the module has "
                        f"{tuple(own[name].shape)}"
                    )
                own[name].copy_(tensor)

    @classmethod
    def actions(cls) -> list[str]:
        """Names of the methods that the server may ask for."""
        return sorted(name for name in dir(cls) if _is_action(cls, name))

    def act(self, action: str, message: Message, ctx: ClientContext) -> Message:
        """Runs one action by its name.

        Raises:
            ValueError: If there is no such action; names those that there are.
        """
        if not _is_action(type(self), action):
            raise ValueError(f"{type(self).__name__} has no action {[action]}; it has {self.actions()}")
        reply: Message = getattr(self, action)(message, ctx)
        return reply

    # -- local training -----------------------------------------------------------------------------------------

    def local_optimizer(self) -> torch.optim.Optimizer:
        """A new optimiser for one phase of local training; what `configure_optimizers` returns."""
        optimizer = self.configure_optimizers()
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(self).__name__}.configure_optimizers must return one optimiser for local training")
        return optimizer

    def fit_locally(
        self,
        ctx: WorkContext,
        epochs: int,
        *,
        batches: Callable[[int], Iterable[Batch]],
        loss: Callable[[Batch], Terms] | None = None,
        after_epoch: Callable[[int], None] | None = None,
    ) -> LocalFit:
        """The one local training loop: a new optimiser, then `epochs` passes over batches of tensors in memory.

        Mixed precision and loss scaling come from `ctx.fabric`; the gradient's norm is clipped to `max_grad_norm`.

        Args:
            ctx: Generators, device and precision.
            epochs: Number of passes.
            batches: Gives the batches of one epoch, tensors already on `ctx.device`.
            loss: Gives the terms of one batch, with the key "loss"; default is `training_step`. Only a method of this
                module, or `functools.partial` of one, can be trained together with other clients.
            after_epoch: Called after every epoch, the module still in training mode.

        Returns:
            Steps made and the mean terms of the last epoch.

        Raises:
            NonFiniteLossError: If the loss, or a weight by the last step, became NaN or infinite; names who, the epoch
                and the last finite loss.
        """
        work = LocalWork(epochs, batches, loss or self._terms_of_step, after_epoch)
        if isinstance(ctx, ClientContext) and ctx.together is not None:
            return ctx.together(self, ctx, work)
        optimizer = ctx.fabric.setup_optimizers(self._clippable(self.local_optimizer()))
        sums = EpochSums()
        run = LocalRun(self, ctx, work, sums)
        draws = seeded(ctx.seed_for("layers")) if self.draws_in_training else nullcontext()
        with draws, torch.enable_grad():
            for batch in run.batches():
                sums.add(self._step(ctx, optimizer, work.loss, batch))
        return run.finish(self._all_finite)

    def _clippable(self, optimizer: torch.optim.Optimizer, clips: bool = False) -> torch.optim.Optimizer:
        """The optimiser, which leaves the undoing of a loss scale to the scaler if gradients are clipped.

        Fused optimisers undo it within their step, after any clipping, and say so by this attribute; Lightning refuses
        to clip for them. They step equally well where it was undone before.
        """
        if clips or self.max_grad_norm is not None:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return optimizer

    def _all_finite(self) -> bool:
        """Whether all that would be exchanged is finite, BatchNorm's statistics included."""
        found = [torch.isfinite(tensor).all() for tensor in self.exchanged().values() if tensor.is_floating_point()]
        return bool(torch.stack(found).all())

    def _step(self, ctx: WorkContext, optimizer: Any, loss: Callable[[Batch], Terms], batch: Batch) -> Terms:
        optimizer.zero_grad()
        # Autocast drops its half-precision copies of the weights only when the outermost autocast block ends. Inside
        # a Trainer's step that is after the whole round: every step would go on with the weights of the first one.
        torch.clear_autocast_cache()
        with ctx.fabric.autocast():
            terms = loss(batch)
        ctx.fabric.backward(terms["loss"])
        if self.max_grad_norm is not None:
            ctx.fabric.clip_gradients(self, optimizer, max_norm=self.max_grad_norm, error_if_nonfinite=False)
        optimizer.step()
        return terms

    def _terms_of_step(self, batch: Batch) -> Terms:
        output = self.training_step(batch, 0)
        if isinstance(output, torch.Tensor):
            return {"loss": output}
        if not isinstance(output, Mapping) or "loss" not in output:
            raise TypeError(f"{type(self).__name__}.training_step must return a loss or a dict with the key 'loss'")
        return dict(output)

    # -- under a plain Trainer ----------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Has fused optimisers take part in clipping under a plain Trainer."""
        for optimizer in self.trainer.optimizers:
            self._clippable(optimizer, clips=self.trainer.gradient_clip_val is not None)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips to `max_grad_norm` under a plain Trainer too; the Trainer's own flag comes first."""
        if gradient_clip_val is None:
            gradient_clip_val, gradient_clip_algorithm = self.max_grad_norm, "norm"
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the terms of `training_step` under a plain Trainer."""
        terms = outputs if isinstance(outputs, Mapping) else {"loss": outputs}
        size = next((len(value) for value in batch.values()), 1) if isinstance(batch, Mapping) else len(batch)
        values = {f"train/{name}": value for name, value in terms.items() if isinstance(value, torch.Tensor)}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=size, prog_bar=True)


def parameter_count(module: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _is_action(cls: type, name: str) -> bool:
    """Whether the class or one of its bases has marked this method."""
    marked = any(getattr(vars(base).get(name), "__fedclust_action__", False) for base in cls.__mro__)
    return marked and callable(getattr(cls, name, None))
