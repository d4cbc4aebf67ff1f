"""The commands that run a Trainer: fit, validate, test, predict."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fedclust.federation import checkpoint
from fedclust.launch.arguments import prepare
from fedclust.launch.errors import explain
from fedclust.launch.parser import FedclustCLI
from fedclust.launch.process import borrowed_process
from fedclust.report.predictions import predict_rows, weights_only, write_predictions
from fedclust.report.table import metrics_table, results_table


def run_command(command: str, arguments: Sequence[str]) -> int:
    """Runs one command; returns its exit code, see `fedclust.cli.main`."""
    run = _Run(command)
    debug = "--debug" in arguments or os.environ.get("FEDCLUST_DEBUG", "0") not in ("", "0")
    with borrowed_process():
        try:
            run.execute(arguments)
        except KeyboardInterrupt:
            return run.close(130)
        except SystemExit as stop:
            if run.interrupted():
                run.say_interrupted()
                return run.close(130)
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception as error:  # the edge of the program: every error becomes one paragraph and an exit code
            if debug:
                run.close(1)
                raise
            tqdm.write(f"fedclust {command}: error: {explain(error)}", file=sys.stderr)
            return run.close(1 if run.started() else 2)
        return run.close(0)


class _Run:
    """One command from its arguments to the last line."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.cli: FedclustCLI | None = None

    def execute(self, arguments: Sequence[str]) -> None:
        prepared = prepare(self.command, arguments)
        self.cli = FedclustCLI(self.command, prepared.arguments, prepared.name)
        path = self.cli.ckpt_path
        if path is not None:
            check_checkpoint(path)
        getattr(self, self.command)(None if path is None else str(path))

    # -- commands -------------------------------------------------------------------------------------------------

    def fit(self, path: str | None) -> None:
        cli, recorder = self._parts()
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=path, **weights_only(cli.trainer.fit))
        cli.test_selected(cli.datamodule)
        _say(results_table(recorder.summary))

    def validate(self, path: str | None) -> None:
        self._evaluate("validate", path)

    def test(self, path: str | None) -> None:
        self._evaluate("test", path)

    def predict(self, path: str | None) -> None:
        cli, _ = self._parts()
        assert cli.run_directory is not None
        file = cli.run_directory.path / "predictions.csv"
        count = write_predictions(file, predict_rows(cli.trainer, cli.model, cli.datamodule, path))
        _say(f"{count} rows in {file}")

    def _evaluate(self, verb: str, path: str | None) -> None:
        cli, recorder = self._parts()
        method = getattr(cli.trainer, verb)
        method(cli.model, datamodule=cli.datamodule, ckpt_path=path, verbose=False, **weights_only(method))
        _say(metrics_table(recorder.summary))

    # -- ends -----------------------------------------------------------------------------------------------------

    def started(self) -> bool:
        """Whether all checks were passed and work began."""
        return self.cli is not None and self.cli.recorder is not None and self.cli.recorder.started

    def interrupted(self) -> bool:
        return self.started() and self._parts()[1].summary["status"] == "interrupted"

    def say_interrupted(self) -> None:
        """Says how an interrupted fit goes on."""
        last = None if self.cli is None or self.cli.run_directory is None else self.cli.run_directory.checkpoints
        if last is not None and (last / "last.ckpt").is_file():
            _say(f"interrupted; it goes on with: fedclust fit --ckpt_path {last / 'last.ckpt'}")
        else:
            _say("interrupted before the first round was done")

    def close(self, code: int) -> int:
        """Removes a directory that stayed empty; else says where the run lies."""
        directory = None if self.cli is None else self.cli.run_directory
        if directory is not None and not directory.remove_if_empty():
            _say(f"run: {directory.path}")
        return code

    def _parts(self) -> tuple[FedclustCLI, Any]:
        assert self.cli is not None
        assert self.cli.recorder is not None
        return self.cli, self.cli.recorder


def check_checkpoint(path: Path) -> None:
    """Raises ValueError if there is no whole checkpoint of a Trainer at `path`."""
    if not path.is_file():
        raise ValueError(f"--ckpt_path: there is no file {str(path)!r}")
    try:
        saved = checkpoint.read(path)
    except ValueError as error:
        raise ValueError(f"--ckpt_path: {error}") from error
    if not isinstance(saved.get("state_dict"), dict) or "pytorch-lightning_version" not in saved:
        raise ValueError(f"--ckpt_path: {path} was not written by a Trainer")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
