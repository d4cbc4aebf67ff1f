"""Search spaces: a YAML file of dotted paths into the configuration, read and checked as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from optuna.distributions import BaseDistribution
from optuna.trial import Trial

from fedclust.launch.configs import find_shipped
from tuning.parameters import Parameter, Value, parse_parameter

Values = dict[str, Value]
_SPACES = Path(__file__).parent / "spaces"
_NOT_SEARCHED = ("name", "runs_root", "ckpt_path", "trainer.enable_progress_bar")
_MERGE, _DATE = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:timestamp"


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
        parameters: In the order in which they are drawn; a condition names earlier ones only.
        source: Where it came from, for messages.
    """

    parameters: tuple[Parameter, ...]
    source: str = field(compare=False)

    def suggest(self, trial: Trial) -> Values:
        """Draws the values of a trial; parameters whose condition is not met are left out."""
        values: Values = {}
        for parameter in self.parameters:
            if parameter.active(values):
                values[parameter.name] = parameter.suggest(trial)
        return values

    def overrides(self, values: Mapping[str, Value]) -> list[str]:
        """Command-line arguments that set these values."""
        return [parameter.override(values[parameter.name]) for parameter in self.parameters if parameter.name in values]

    def probes(self) -> Iterator[Values]:
        """Points that between them have every parameter at both ends of its range, and at each of its choices.

        The first is at the lower ends, the second at the upper ones.
        """
        seen: set[tuple[str, Value]] = set()
        yield self._point({}, seen, lambda parameter: parameter.end("low"))
        yield self._point({}, seen, lambda parameter: parameter.end("high"))

        def unseen(parameter: Parameter) -> Value:
            left = (value for value in parameter.probed() if (parameter.name, value) not in seen)
            return next(left, parameter.end("high"))

        for parameter in self.parameters:
            for value in parameter.probed():
                if (parameter.name, value) not in seen:
                    yield self._point({**self._forced(parameter), parameter.name: value}, seen, unseen)

    def describe(self) -> dict[str, Any]:
        """Plain values, equal for spaces that search the same."""
        return {parameter.name: parameter.describe() for parameter in self.parameters}

    def distributions(self) -> dict[str, BaseDistribution]:
        """Name → Optuna's distribution."""
        return {parameter.name: parameter.distribution for parameter in self.parameters}

    def _point(
        self, forced: Values, seen: set[tuple[str, Value]], choose: Callable[[Parameter], Value]
    ) -> Values:  # fmt: skip
        values: Values = {}
        for parameter in self.parameters:
            if parameter.active(values):
                name = parameter.name
                values[name] = forced[name] if name in forced else choose(parameter)
                seen.add((name, values[name]))
        return values

    def _forced(self, parameter: Parameter) -> Values:
        """Values of earlier parameters that make this one active."""
        known = {entry.name: entry for entry in self.parameters}
        forced: Values = {}
        for name, allowed in parameter.when.items():
            forced = {**self._forced(known[name]), **forced, name: allowed[0]}
        return forced


def shipped_spaces() -> dict[str, Path]:
    """Stem → file of every space that comes with the package."""
    return {path.stem: path for path in sorted(_SPACES.glob("*.yaml"))}


def find_space(name: str | Path) -> Path:
    """The file that `--space NAME` means: a path if it exists, else a shipped space of that name.

    Raises:
        ValueError: If there is neither; lists the shipped ones.
    """
    folders = (Path(), Path("spaces"), Path("tuning/spaces"))
    return find_shipped(name, shipped_spaces(), "--space", "space", folders)


def load_space(space: str | Path | Mapping[str, Any]) -> Space:
    """Reads a space from a file, a shipped space's name, or a mapping of the same shape.

    Raises:
        ValueError: Naming file, parameter, value and what is allowed.
    """
    if isinstance(space, Mapping):
        return parse_space(space, "space")
    path = find_space(space)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    return parse_space(content, str(path))


def parse_space(content: Any, source: str) -> Space:
    """A space from the content of its file: {"parameters": {path: {"kind": …, …}}}.

    Raises:
        ValueError: Naming parameter, value and what is allowed.
    """
    if not isinstance(content, Mapping) or set(content) != {"parameters"}:
        raise ValueError(f"{source}: a space has one entry, 'parameters', that maps dotted paths to ranges")
    entries = content["parameters"]
    if not isinstance(entries, Mapping) or not entries:
        raise ValueError(f"{source}: 'parameters' must map at least one dotted path to its range, got {entries!r}")
    for path in entries:
        if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
            raise ValueError(f"{source}: {path!r} is no dotted path such as model.init_args.client.init_args.lr")
        if path in _NOT_SEARCHED:
            raise ValueError(f"{source}: {path} cannot be searched: a study sets it itself for every trial")
    names = _short_names(list(entries))
    parameters: list[Parameter] = []
    for path, entry in entries.items():
        earlier = {key: known for known in parameters for key in (known.path, known.name)}
        later = {key for other in entries for key in (other, names[other])}
        try:
            parameters.append(parse_parameter(path, names[path], entry, earlier, later, source))
        except ArithmeticError as error:
            raise ValueError(f"{source}: {path}: a number is too large or too small: {entry!r}") from error
    return Space(tuple(parameters), source)


def _short_names(paths: list[str]) -> dict[str, str]:
    """For every path its shortest end that no other path has."""
    names = {}
    for path in paths:
        parts = [part for part in path.split(".") if part != "init_args"]
        others = [[part for part in other.split(".") if part != "init_args"] for other in paths if other != path]
        length = next(
            (n for n in range(1, len(parts) + 1) if all(parts[-n:] != other[-n:] for other in others)), None
        )  # fmt: skip
        names[path] = path if length is None else ".".join(parts[-length:])
    return names


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key that is given twice is an error, not a silent replacement, and 1024-64-16 is no date."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != _MERGE]
        keys = [json.dumps(self.construct_object(key, deep=True), default=str) for key in own]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{', '.join(twice)} given twice", node.start_mark)
        return super().construct_mapping(node, deep)
