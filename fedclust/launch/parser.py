"""`FedclustCLI`: LightningCLI for one command, with a run directory and the callbacks that every run has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import yaml
from jsonargparse import Namespace
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, ProgressBar
from pytorch_lightning.callbacks.timer import Interval
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

import fedclust
from fedclust.data.datamodule import FederatedDataModule
from fedclust.federation.loop import FederatedLoop
from fedclust.federation.refusals import refuse_unusable_flags
from fedclust.launch import PURPOSES
from fedclust.launch.arguments import value_of
from fedclust.report.predictions import weights_only
from fedclust.report.progress import RoundProgress
from fedclust.report.recorder import RunRecorder
from fedclust.report.rundir import RunDirectory, run_of_checkpoint
from fedclust.report.selection import BestCheckpoint, LastCheckpoint, best_checkpoint, choose_monitor


def _version() -> tuple[int, int]:
    major, minor, *_ = version("jsonargparse").split(".")
    return int(major), int(minor)


# The CPU gives the same bits for the same seed and needs no search for devices; a GPU is asked for by name.
TRAINER_DEFAULTS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "enable_model_summary": False,
}
_MORE_HELP = (
    "Give a configuration with --config (fedclust configs lists those that come with the package). The arguments of "
    "one part: --model.help fedclust.FederatedLoop, --model.help lightning_modules.DCN or --data.help "
    "fedclust.FederatedDataModule."
)
_NOT_IN_CONFIG = ("config", "ckpt_path", "debug")
# jsonargparse 4.49 renamed the argument.
_KEEP_NULL = {"skip_unset" if _version() >= (4, 49) else "skip_none": False}
# Stands for the run's directory, which does not exist yet when arguments are parsed.
RUN_PLACEHOLDER = "{run}"
_NEEDS_SAVE_DIR = ("CSVLogger", "TensorBoardLogger")
# The default of Timer's `interval`, which YAML could not write otherwise.
yaml.SafeDumper.add_representer(Interval, lambda dumper, value: dumper.represent_str(str(value.value)))


class FedclustCLI(LightningCLI):
    """Parses one command and builds model, data and Trainer; `run_directory` and `recorder` belong to the run.

    Args:
        command: "fit", "validate", "test" or "predict".
        arguments: Its arguments.
        name: Name of the run where neither `--name` nor the configuration gives one.
        callbacks: Callbacks beside the configured ones and those that every run has.
    """

    def __init__(self, command: str, arguments: Sequence[str], name: str, callbacks: Sequence[Callback] = ()) -> None:
        self.command = command
        self.more_callbacks = list(callbacks)
        self.default_name = name
        self.run_directory: RunDirectory | None = None
        self.recorder: RunRecorder | None = None
        super().__init__(
            model_class=pl.LightningModule,
            datamodule_class=pl.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            trainer_defaults=TRAINER_DEFAULTS,
            seed_everything_default=0,
            parser_kwargs={
                "prog": f"fedclust {command}",
                "description": f"fedclust {command}: {PURPOSES[command]}. {_MORE_HELP}",
                "exit_on_error": False,
                "allow_abbrev": False,
                "dump_header": [f"fedclust=={fedclust.__version__}"],
            },
            args=list(arguments),
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    # -- parsing --------------------------------------------------------------------------------------------------

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The one seed."""
        parser.add_argument(
            "--seed_everything", type=int, default=0, help="The one seed of the run: partition, weights, every draw."
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Where the run goes, and what it starts from."""
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="Checkpoint to go on from or to use.")
        parser.add_argument(
            "--name", type=str | None, default=None, help="Name of the run; default: the configuration's file name."
        )
        parser.add_argument("--runs_root", type=str, default="runs", help="Directory of all runs.")
        parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parses; the process' own arguments do not matter."""
        self.config = parser.parse_args(with_save_dir(args))

    def _set_seed(self) -> None:
        seed = self.config["seed_everything"]
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed_everything must be a whole number from 0 to {2**32 - 1}, not {seed}")
        seed_everything(seed, workers=True, verbose=False)

    # -- building -------------------------------------------------------------------------------------------------

    @property
    def ckpt_path(self) -> Path | None:
        """The checkpoint that was asked for."""
        path = self.config["ckpt_path"]
        return None if path is None else Path(path).expanduser()

    @property
    def parent(self) -> str | None:
        """The run, or else the checkpoint, that this run goes on from."""
        path = self.ckpt_path
        return None if path is None else str((run_of_checkpoint(path) or path).absolute())

    def instantiate_classes(self) -> None:
        """Makes the run's directory, then model, data and Trainer; removes the directory again if that fails."""
        self._config_text = self.config_text()
        self.run_directory = RunDirectory.create(self.config["runs_root"], self.config["name"] or self.default_name)
        try:
            _place_loggers(self.config["trainer"], str(self.run_directory.path))
            super().instantiate_classes()
        except BaseException:
            self.run_directory.remove_if_empty()
            raise

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """A Trainer with the callbacks of every run beside the configured ones."""
        assert self.run_directory is not None
        settings = {**self.config_init["trainer"], **kwargs}
        configured = settings["callbacks"] or []
        settings["callbacks"] = list(configured) if isinstance(configured, list) else [configured]
        settings["callbacks"] += self._own_callbacks(settings, self.run_directory)
        settings["default_root_dir"] = settings["default_root_dir"] or str(self.run_directory.path)
        trainer = pl.Trainer(**settings)
        _refuse_early(trainer, self.model)
        return trainer

    def test_selected(self, data: Any) -> None:
        """Tests the selected round after a fit, where there are rows to test and no limit leaves none."""
        trainer = self.trainer
        if (hasattr(data, "test") and not len(data.test)) or trainer.limit_test_batches == 0:
            return
        best = best_checkpoint(trainer)
        path = None if best is None else str(best)
        trainer.test(self.model, datamodule=data, ckpt_path=path, verbose=False, **weights_only(trainer.test))

    def _own_callbacks(self, settings: dict[str, Any], directory: RunDirectory) -> list[Callback]:
        configured: list[Callback] = settings["callbacks"]
        for callback in configured:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = os.path.realpath(directory.checkpoints)
        monitor = choose_monitor(self.model, configured)
        self.recorder = RunRecorder(
            directory.path, command=self.command, parent=self.parent, config=self._config_text, monitor=monitor
        )
        self._note_other_seed()
        own: list[Callback] = [self.recorder]
        if settings["enable_checkpointing"] is not False:
            own += [BestCheckpoint(directory.checkpoints, monitor.name, monitor.mode)]
            own += [LastCheckpoint(directory.checkpoints)]
        has_bar = any(isinstance(callback, ProgressBar) for callback in configured)
        if settings["enable_progress_bar"] is not False and not has_bar:
            own.append(RoundProgress(monitor.name))
        return own + self.more_callbacks

    def _note_other_seed(self) -> None:
        assert self.recorder is not None
        given = self.config["seed_everything"]
        seed = self.datamodule.seed if isinstance(self.datamodule, FederatedDataModule) else None
        if seed is not None and given not in (0, seed):
            self.recorder.summary["notes"].append(
                f"data.seed {seed} is the seed of the run; seed_everything {given} is not used"
            )

    def config_text(self) -> str:
        """The resolved configuration as YAML; it runs the same again."""
        config: Namespace = self.config.clone()
        for name in _NOT_IN_CONFIG:
            config.pop(name, None)
        config["name"] = config["name"] or self.default_name
        return str(self.parser.dump(config, skip_validation=True, **_KEEP_NULL))


def with_save_dir(arguments: Sequence[str]) -> list[str]:
    """Adds where a logger writes that needs to be told, if it was named without: into the run's directory."""
    told = any(argument.partition("=")[0].endswith(".save_dir") for argument in arguments)
    logger = value_of("--trainer.logger", arguments)
    if told or logger is None or logger.rpartition(".")[2] not in _NEEDS_SAVE_DIR:
        return list(arguments)
    return [*arguments, f"--trainer.logger.init_args.save_dir={RUN_PLACEHOLDER}"]


def _refuse_early(trainer: pl.Trainer, model: pl.LightningModule) -> None:
    """Refuses what cannot work before the Trainer starts further processes for it."""
    if isinstance(model, FederatedLoop):
        refuse_unusable_flags(trainer)
    if trainer.world_size > 1:
        raise ValueError(
            f"trainer.devices/num_nodes: {trainer.world_size} processes would write into one run; use devices=1"
        )


def _place_loggers(trainer: Namespace, directory: str) -> None:
    configured = trainer["logger"]
    for logger in configured if isinstance(configured, list) else [configured]:
        arguments = logger.get("init_args") if isinstance(logger, Namespace) else None
        if arguments is not None and arguments.get("save_dir") == RUN_PLACEHOLDER:
            arguments["save_dir"] = directory
