"""What happens to the command line before it is parsed: `--config NAME` and the configuration of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from fedclust.launch.configs import find_config
from fedclust.report.rundir import run_of_checkpoint

_CONFIG_FLAGS = ("--config", "-c")
_NO_RUN = ("--help", "-h", "--print_config")


@dataclass(frozen=True)
class Prepared:
    """Arguments ready for the parser.

    Attributes:
        arguments: The arguments, configurations as paths.
        name: Name for the run, from the last configuration.
    """

    arguments: list[str]
    name: str


def prepare(command: str, arguments: Sequence[str]) -> Prepared:
    """Finds configurations by name; a checkpoint without configuration brings that of its own run.

    Raises:
        ValueError: If a configuration or checkpoint does not exist, or a command that needs a checkpoint has none.
    """
    found, configs = _find_configs(arguments)
    if any(flag.partition("=")[0] in _NO_RUN or ".help" in flag for flag in found):
        return Prepared(found, "run")
    checkpoint = value_of("--ckpt_path", found)
    if checkpoint is None and not configs and not any(flag.startswith(("--model", "--data")) for flag in found):
        raise ValueError(
            f"fedclust {command} needs a configuration: --config NAME or --config FILE (fedclust configs lists those "
            "that come with the package), or --ckpt_path with a run's checkpoint"
        )
    if checkpoint is None and command != "fit" and not configs_name_checkpoint(configs):
        raise ValueError(
            f"fedclust {command} needs a checkpoint: --ckpt_path runs/NAME/version_N/checkpoints/best.ckpt"
        )
    if checkpoint is not None and not configs:
        own = _config_of(Path(checkpoint).expanduser())
        found, configs = ["--config", str(own), *found], [own]
    return Prepared(found, _run_name(configs))


def value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """The last value of `--flag value` or `--flag=value`."""
    value = None
    for position, argument in enumerate(arguments):
        if argument == flag and position + 1 < len(arguments):
            value = arguments[position + 1]
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
    return value


def configs_name_checkpoint(configs: Sequence[Path]) -> bool:
    """Whether a configuration itself sets `ckpt_path`."""
    return any(
        re.search(r"^ckpt_path:[ \t]*(?!null\b|~)[^\s#]", path.read_text(encoding="utf-8"), re.MULTILINE)
        for path in configs
    )


def _find_configs(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    found: list[str] = []
    configs: list[Path] = []
    following = False
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if following:
            configs.append(_checked(find_config(argument)))
            found.append(str(configs[-1]))
        elif flag in _CONFIG_FLAGS and equals:
            configs.append(_checked(find_config(value)))
            found += [flag, str(configs[-1])]
        else:
            found.append(argument)
        following = not following and argument in _CONFIG_FLAGS
    return found, configs


def _checked(path: Path) -> Path:
    """Raises ValueError for a file that holds no keys; what keys and YAML may be, the parser knows."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--config {path}: the file is no UTF-8 text ({error.reason} at byte {error.start})"
        ) from error
    except (yaml.YAMLError, ValueError):  # the latter for dates that are none
        return path
    if not isinstance(content, Mapping):
        found = "empty" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"--config {path}: the file is {found}; a configuration has keys such as model, data, trainer")
    return path


def _config_of(checkpoint: Path) -> Path:
    if not checkpoint.is_file():
        raise ValueError(f"--ckpt_path: there is no file {str(checkpoint)!r}")
    run = run_of_checkpoint(checkpoint)
    if run is None:
        raise ValueError(
            f"--ckpt_path {checkpoint} lies in no run directory (checkpoints/ beside config.yaml): give --config too"
        )
    return run / "config.yaml"


def _run_name(configs: Sequence[Path]) -> str:
    if not configs:
        return "run"
    path = configs[-1].absolute()
    of_run = path.name == "config.yaml" and re.fullmatch(r"version_\d+", path.parent.name)
    return path.parent.parent.name if of_run else re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem)
