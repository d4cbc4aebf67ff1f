"""Progress whose unit is the round: a bar in a terminal, sparse lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any, TextIO

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from tqdm import tqdm

_SHOWN = ("train/recon", "train/loss")
_GROUPS = ("clusters/final", "clients/ari", "privacy/epsilon_total")


class RoundProgress(ProgressBar):
    """Shows rounds done and metrics, and before the first round what the server is doing.

    Where the stream is no terminal, a line is written for the first and the last round and in between at most every
    `interval` seconds.

    Args:
        monitor: Metric to show first.
        interval: Least seconds between two lines outside a terminal.
        stream: Where to write; None is stderr.
    """

    def __init__(self, monitor: str | None = None, interval: float = 5.0, stream: TextIO | None = None) -> None:
        super().__init__()
        self.monitor = monitor
        self.interval = interval
        self._stream = stream
        self._bar: tqdm[Any] | None = None
        self._enabled = True
        self._last_line = -float("inf")

    def disable(self) -> None:
        """Shows nothing."""
        self._enabled = False

    def enable(self) -> None:
        """Shows progress again."""
        self._enabled = True

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Has a federated loop report what its server is doing."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and hasattr(pl_module, "report_progress"):
            pl_module.report_progress = self.say  # type: ignore[assignment]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the bar."""
        if self._enabled and self._terminal():
            size = shutil.get_terminal_size()  # unlike tqdm's own look it never answers 0 columns or lines
            self._bar = tqdm(
                total=trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None,
                initial=trainer.current_epoch,
                desc="Rounds",
                unit="round",
                file=self._out(),
                ncols=size.columns,
                nrows=size.lines,
                bar_format="{desc}: {n_fmt}/{total_fmt} [{bar:20}] {elapsed}{postfix}",
                postfix="preparing" if trainer.current_epoch == 0 else None,
            )

    def say(self, text: str) -> None:
        """Shows what the server is doing."""
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        else:
            self._line(text)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One round is done."""
        done, total = trainer.current_epoch + 1, trainer.max_epochs
        text = self._figures(trainer, pl_module)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(done - self._bar.n)
        else:
            of = f"/{total}" if total and total > 0 else ""
            self._line(f"round {done}{of}  {text}", always=done in (1, total))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Closes the bar."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Closes the bar."""
        self._close()

    def _figures(self, trainer: pl.Trainer, module: pl.LightningModule) -> str:
        values = getattr(module, "latest", None) or trainer.callback_metrics
        names = [self.monitor, "val/acc", next((name for name in _SHOWN if name in values), None), *_GROUPS]
        shown = [name for name in dict.fromkeys(names) if name is not None and name in values]
        return " ".join(f"{name}={float(values[name]):.4g}" for name in shown)

    def _line(self, text: str, always: bool = False) -> None:
        now = time.monotonic()
        if self._enabled and (always or now - self._last_line >= self.interval):
            self._last_line = now
            self._out().write(text.rstrip() + "\n")
            self._out().flush()

    def _out(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _terminal(self) -> bool:
        return self._out().isatty()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
