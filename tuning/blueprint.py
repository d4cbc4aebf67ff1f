"""The configuration that all trials share, checked as a whole before the first one."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedclust.federation.loop import ROUND_METRICS
from fedclust.launch.arguments import prepare, value_of
from fedclust.launch.errors import explain
from fedclust.launch.parser import FedclustCLI
from fedclust.launch.process import borrowed_process
from fedclust.report.files import write_text
from fedclust.report.selection import LABEL_METRICS, choose_monitor, uses_labels
from tuning.objectives import Objective, check_available
from tuning.parameters import Value
from tuning.space import Space

_REFUSED = {
    "--ckpt_path": "every trial starts from the beginning",
    "--name": "trials are named by number; --study-name names the study",
    "--print_config": "fedclust fit --print_config prints a configuration",
}
_OF = "# study "
_DATA_SEED = "--data.init_args.seed"
# Say where and how a run is shown, not what it computes.
_NOT_COMPARED = ("name", "runs_root")


class ParsedConfig(FedclustCLI):
    """A configuration that was parsed, from which nothing has been built yet."""

    def instantiate_classes(self) -> None:
        """Builds nothing."""
        self.text = self.config_text()

    def build(self) -> tuple[Any, Any]:
        """Model and data module, as `fit` would build them."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            method = getattr(self.parser, "instantiate", None) or self.parser.instantiate_classes
            built = method(self.config)
        return built["model"], built["data"]


@dataclass(frozen=True)
class Blueprint:
    """What every trial starts from; goes to worker processes.

    Attributes:
        text: The resolved configuration, as YAML.
        space: What is searched.
        objectives: What is optimised.
        seed: Seed of the study's draws.
        runs_root: Directory of all runs that the configuration names.
        name: The configuration's name.
        labels: One entry per objective: whether it uses labels.
        terms: The metrics that "loss" adds up.
        monitor: The metric that selects a run's round.
        label_metrics: Metrics that need labels, names without the split.
        runs_seed: The runs' seed.
        config: The resolved configuration, as plain values.
    """

    text: str
    space: Space
    objectives: tuple[Objective, ...]
    seed: int
    runs_root: str
    name: str
    labels: tuple[bool, ...] = ()
    terms: tuple[str, ...] = ()
    monitor: str = ""
    label_metrics: tuple[str, ...] = ()
    runs_seed: int = 0
    config: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def uses_labels(self) -> bool:
        """Whether any objective uses labels."""
        return any(self.labels)

    def under_seed(self, values: Mapping[str, Value], seed: int) -> list[str]:
        """Command-line arguments that set these values and another seed."""
        overrides = self.space.overrides(values)
        # A seed of the data module's own comes before the run's.
        own = _data_seed(self.config) is not None or any(entry.startswith(f"{_DATA_SEED}=") for entry in overrides)
        return [*overrides, f"--seed_everything={seed}", *([f"{_DATA_SEED}={seed}"] if own else [])]

    def write(self, directory: Path) -> Path:
        """Writes the shared configuration, from which trials start, and in its first line which study it is of."""
        path = directory / "base.yaml"
        text = f"{_OF}{digest(self.described())}\n{self.text}"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
        return path

    def claim(self, directory: Path) -> None:
        """Checks that the directory is not that of another study.

        Raises:
            ValueError: If it is: its trials would go on with this study's configuration.
        """
        path = directory / "base.yaml"
        first = path.read_text(encoding="utf-8").partition("\n")[0] if path.is_file() else ""
        if first.startswith(_OF) and first != f"{_OF}{digest(self.described())}":
            raise ValueError(
                f"{directory} is the directory of a study with another configuration, space or objective, in another "
                "--storage; give another --study-name"
            )

    def resolved(self, base: Path, values: Mapping[str, Value], name: str) -> str:
        """The full configuration with these values, as YAML that `fedclust fit` runs as it is."""
        arguments = ["--config", str(base), *self.space.overrides(values), f"--name={name}"]
        with borrowed_process():
            return ParsedConfig("fit", arguments, name).text

    def described(self) -> dict[str, Any]:
        """What must be equal for a study to go on: configuration, space, objectives."""
        compared = {name: value for name, value in self.config.items() if name not in _NOT_COMPARED}
        trainer = dict(compared.get("trainer", {}))
        trainer.pop("enable_progress_bar", None)
        return {
            "configuration": {**compared, "trainer": trainer},
            "space": self.space.describe(),
            "objective": [str(objective) for objective in self.objectives],
        }


def digest(described: Mapping[str, Any]) -> str:
    """A short digest of plain values."""
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def differences(before: Any, now: Any, path: str = "") -> list[str]:
    """What differs between two nested mappings, one sentence each."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        found = []
        for key in sorted({*before, *now}, key=str):
            found += differences(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
        return found
    return [] if before == now else [f"{path} was {before!r}, is {now!r}"]


def make_blueprint(
    arguments: Sequence[str], space: Space, objectives: tuple[Objective, ...], seed: int | None = None
) -> Blueprint:
    """Parses the configuration, tries the ends of the space's ranges, and finds out which metrics there will be.

    Args:
        arguments: As for `fedclust fit`: configurations and overrides that hold for all trials.
        space: What is searched.
        objectives: What is optimised.
        seed: Seed of the study's draws; None takes that of the runs.

    Raises:
        ValueError: In one sentence, for a configuration, space or objective that cannot work.
    """
    _refuse(arguments)
    prepared = prepare("fit", arguments)
    with borrowed_process():
        base = ParsedConfig("fit", prepared.arguments, prepared.name)
        config = yaml.safe_load(base.text)
        model, data, methods = _probe(prepared.arguments, prepared.name, space)
        method = getattr(model, "algorithm", model)
        terms = _loss_terms(methods)
        check_available(objectives, terms, _metric_names(methods, data) - ROUND_METRICS)
        _check_validation_rows(objectives, data)
        labels = tuple(uses_labels(model, objective.name) for objective in objectives)
    data_seed = _data_seed(config)
    runs_seed = int(config["seed_everything"] if data_seed is None else data_seed)
    return Blueprint(
        text=base.text, space=space, objectives=objectives, runs_root=str(base.config["runs_root"]),
        seed=runs_seed if seed is None else seed, name=prepared.name, labels=labels, runs_seed=runs_seed, terms=terms,
        monitor=_monitor(config, model), config=config,
        label_metrics=tuple(sorted(getattr(method, "label_metrics", LABEL_METRICS))),
    )  # fmt: skip


def _data_seed(config: Mapping[str, Any]) -> int | None:
    """The seed that the configuration gives the data module."""
    seed = (config.get("data", {}).get("init_args") or {}).get("seed")
    return None if seed is None else int(seed)


def _monitor(config: Mapping[str, Any], model: Any) -> str:
    """The metric that selects the round of every run: of a configured callback, else the method's own."""
    callbacks = config.get("trainer", {}).get("callbacks") or []
    for kind in ("ModelCheckpoint", "EarlyStopping"):
        for entry in callbacks if isinstance(callbacks, list) else [callbacks]:
            monitor = entry.get("init_args", {}).get("monitor") if isinstance(entry, dict) else None
            if monitor and str(entry.get("class_path")).endswith(kind):
                return str(monitor)
    return choose_monitor(model, []).name


def _refuse(arguments: Sequence[str]) -> None:
    for flag, reason in _REFUSED.items():
        if value_of(flag, arguments) is not None or flag in arguments:
            raise ValueError(f"fedclust tune does not take {flag}: {reason}")
    if not any(flag.partition("=")[0] in ("-c", "--config") or flag.startswith("--model") for flag in arguments):
        raise ValueError(
            "fedclust tune needs a configuration: --config NAME or --config FILE (fedclust configs lists those that "
            "come with the package)"
        )


def _loss_terms(methods: Sequence[Any]) -> tuple[str, ...]:
    """The terms that any trial may have: a weight of 0 takes its term out of some, but not of what "loss" means."""
    found = [method.loss_terms() for method in methods if hasattr(method, "loss_terms")]
    return tuple(dict.fromkeys(name for terms in sorted(found, key=len, reverse=True) for name in terms))


def _metric_names(methods: Sequence[Any], data: Any) -> frozenset[str]:
    """All metrics that any trial logs; empty if one cannot say before the first round."""
    if not all(hasattr(method, "metric_names") for method in methods):
        return frozenset()
    labels = data.n_classes is not None
    found = [frozenset(method.metric_names(labels)) for method in methods]
    return frozenset().union(*found) if all(found) else frozenset()


def _probe(arguments: Sequence[str], name: str, space: Space) -> tuple[Any, Any, list[Any]]:
    """Builds model and data at the ends of every range, so that a wrong path or range is found before the study.

    Returns:
        Model and data module of a point at the upper ends, and the methods of all points.
    """
    built: list[tuple[Any, Any]] = []
    for point in space.probes():
        try:
            built.append(ParsedConfig("fit", [*arguments, *space.overrides(point)], name).build())
        except Exception as error:
            culprit = _culprit(arguments, name, space, point)
            where = f"{space.source}: {culprit}" if culprit else f"{space.source}: {point}"
            raise ValueError(f"{where}: the configuration does not take it: {explain(error)}") from error
    model, data = built[1]
    return model, data, [getattr(model, "algorithm", model) for model, _ in built]


def _culprit(arguments: Sequence[str], name: str, space: Space, point: Mapping[str, Value]) -> str | None:
    """The one value that fails by itself, if there is one."""
    for parameter in space.parameters:
        if parameter.name not in point:
            continue
        override = parameter.override(point[parameter.name])
        try:
            ParsedConfig("fit", [*arguments, override], name).build()
        except Exception:
            return override.removeprefix("--").replace("=", " = ", 1)
    return None


def _check_validation_rows(objectives: Sequence[Objective], data: Any) -> None:
    names = [objective.name for objective in objectives if objective.name.startswith("val/")]
    if names and not len(data.val):
        raise ValueError(f"objective {names[0]}: there are no validation rows; val_fraction is {data.val_fraction}")
