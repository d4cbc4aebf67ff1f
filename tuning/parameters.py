"""One parameter of a search space: its kind, range and condition."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import Trial

Value = None | bool | int | float | str
NUMBERS = ("float", "log_float", "int", "log_int")
KINDS = (*NUMBERS, "categorical", "layers")
_NUMBER_KEYS = {"kind", "low", "high", "step", "log", "when"}
_CHOICE_KEYS = {"kind", "choices", "when"}


@dataclass(frozen=True)
class Parameter:
    """A value of the configuration that trials draw.

    Attributes:
        path: Dotted path into the configuration.
        name: Short name, for tables and figures.
        kind: "float", "int", "categorical" or "layers".
        distribution: Optuna's distribution; layers are strings such as "512-256-128".
        when: Name of an earlier parameter → its values for which this one is drawn.
    """

    path: str
    name: str
    kind: str
    distribution: BaseDistribution
    when: Mapping[str, Sequence[Value]] = field(default_factory=dict)

    def active(self, values: Mapping[str, Value]) -> bool:
        """Whether the condition is met by the values drawn so far."""
        return all(name in values and values[name] in allowed for name, allowed in self.when.items())

    def suggest(self, trial: Trial) -> Value:
        """Draws a value."""
        kind = self.distribution
        if isinstance(kind, FloatDistribution):
            return trial.suggest_float(self.name, kind.low, kind.high, step=kind.step, log=kind.log)
        if isinstance(kind, IntDistribution):
            return trial.suggest_int(self.name, kind.low, kind.high, step=kind.step, log=kind.log)
        assert isinstance(kind, CategoricalDistribution)
        return trial.suggest_categorical(self.name, kind.choices)

    def end(self, end: str) -> Value:
        """The lower or upper end of the range; of choices the first or last."""
        kind = self.distribution
        if isinstance(kind, CategoricalDistribution):
            return kind.choices[0 if end == "low" else -1]
        return getattr(kind, end)

    def probed(self) -> list[Value]:
        """The values that are tried before a study: both ends, or every choice."""
        kind = self.distribution
        if isinstance(kind, CategoricalDistribution):
            return list(kind.choices)
        return [self.end("low"), self.end("high")]

    def plain(self, value: Value) -> Any:
        """The value as the configuration holds it."""
        return [int(width) for width in str(value).split("-")] if self.kind == "layers" else value

    def override(self, value: Value) -> str:
        """A command-line argument that sets the value."""
        plain = self.plain(value)
        return f"--{self.path}={plain if isinstance(plain, str) else json.dumps(plain)}"

    def describe(self) -> dict[str, Any]:
        """Plain values that say the same."""
        kind = self.distribution
        if isinstance(kind, CategoricalDistribution):
            entry: dict[str, Any] = {"choices": list(kind.choices)}
        else:
            entry = {name: getattr(kind, name) for name in ("low", "high", "step", "log")}
        when = {name: list(allowed) for name, allowed in self.when.items()}
        return {"path": self.path, "kind": self.kind, **entry, **({"when": when} if when else {})}


def parse_parameter(
    path: str, name: str, entry: Any, earlier: Mapping[str, Parameter], known: set[str], source: str
) -> Parameter:
    """One entry of a space's file.

    Args:
        path: Dotted path into the configuration.
        name: Short name.
        entry: {"kind": …} with "low", "high", "step", "log", or "choices", and perhaps "when".
        earlier: Path and name → parameter, of those above it.
        known: Paths and names of all parameters of the space.
        source: Where the entry comes from.

    Raises:
        ValueError: Naming parameter, value and what is allowed.
    """
    where = f"{source}: {path}"
    if not isinstance(entry, Mapping) or "kind" not in entry:
        raise ValueError(f"{where} must be a mapping with a kind ({', '.join(KINDS)}), got {entry!r}")
    kind = entry["kind"]
    if kind not in KINDS:
        raise ValueError(f"{where}: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    allowed = _NUMBER_KEYS if kind in NUMBERS else _CHOICE_KEYS
    unknown = sorted(str(key) for key in set(entry) - allowed)
    if unknown:
        raise ValueError(f"{where}: kind {kind} takes {', '.join(sorted(allowed))}, not {', '.join(unknown)}")
    distribution = _number(where, kind, entry) if kind in NUMBERS else _choices(where, kind, entry)
    when = _condition(where, entry.get("when"), earlier, known)
    return Parameter(path, name, kind.removeprefix("log_"), distribution, when)


def _number(where: str, kind: str, entry: Mapping[str, Any]) -> BaseDistribution:
    for key in ("low", "high"):
        if key not in entry:
            raise ValueError(f"{where}: kind {kind} needs low and high; {key} is missing")
    log = entry.get("log", False)
    if not isinstance(log, bool):
        raise ValueError(f"{where}: log must be true or false, got {log!r}")
    log = log or kind.startswith("log_")
    whole = kind.endswith("int")
    low, high = (_read(where, key, entry[key], whole) for key in ("low", "high"))
    step = None if entry.get("step") is None else _read(where, "step", entry["step"], whole)
    if low >= high:
        raise ValueError(f"{where}: low must be less than high, got low {low} and high {high}")
    if log and low <= 0:
        raise ValueError(f"{where}: a log scale needs low above 0, got {low}")
    span = Decimal(str(high)) - Decimal(str(low))
    if step is not None and not 0 < Decimal(str(step)) <= span:
        raise ValueError(f"{where}: step must be above 0 and at most high - low = {span}, got {step}")
    if step is not None and log:
        raise ValueError(f"{where}: a log scale has no step, got {step}")
    if whole:
        step = 1 if step is None else int(step)
        return IntDistribution(int(low), int(high) if log else int(low + (high - low) // step * step), log, step)
    if step is not None:
        # In decimals, as Optuna reckons: in binary, 3 steps of 0.3 end below 0.9, and the last one is lost.
        exact = Decimal(str(step))
        high = float(Decimal(str(low)) + span // exact * exact)
    return FloatDistribution(low, high, log, step)


def _read(where: str, key: str, value: Any, whole: bool) -> float:
    # YAML 1.1 reads 1e-4 as a string.
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number) or (whole and number != int(number)):
        raise ValueError(f"{where}: {key} must be a {'whole' if whole else 'finite'} number, got {value!r}")
    return int(number) if whole else number


def _choices(where: str, kind: str, entry: Mapping[str, Any]) -> BaseDistribution:
    choices = entry.get("choices")
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        raise ValueError(f"{where}: kind {kind} needs a list of at least one of choices, got {choices!r}")
    if kind == "layers":
        choices = [_layers(choice) for choice in choices]
        for choice in choices:
            if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)*", choice):
                raise ValueError(f"{where}: layers are widths such as 512-256-128, got {choice!r}")
    for choice in choices:
        if choice is not None and not isinstance(choice, (bool, int, float, str)):
            raise ValueError(f"{where}: a choice must be a number, a string, true, false or null, got {choice!r}")
    # As values: Optuna cannot tell 1, 1.0 and true apart.
    if len(set(choices)) < len(choices):
        raise ValueError(f"{where}: choices must differ (1, 1.0 and true are equal), got {list(choices)}")
    return CategoricalDistribution(choices)


def _layers(widths: Any) -> str:
    return "-".join(map(str, widths)) if isinstance(widths, list) else str(widths)


def _condition(
    where: str, when: Any, earlier: Mapping[str, Parameter], known: set[str]
) -> dict[str, Sequence[Value]]:  # fmt: skip
    if when is None:
        return {}
    if not isinstance(when, Mapping) or not when:
        raise ValueError(f"{where}: when must map another parameter to the values that it is drawn for, got {when!r}")
    condition: dict[str, Sequence[Value]] = {}
    for other, allowed in when.items():
        if other not in earlier:
            problem = "comes later: write it above this one" if other in known else "is no parameter of this space"
            raise ValueError(f"{where}: its condition names {other!r}, which {problem}")
        parameter = earlier[other]
        values = [_layers(value) for value in _as_list(allowed)] if parameter.kind == "layers" else _as_list(allowed)
        possible = parameter.distribution
        if not isinstance(possible, CategoricalDistribution):
            raise ValueError(
                f"{where}: a condition needs a parameter with choices; {other} is of kind {parameter.kind}"
            )
        wrong = [value for value in values if value not in possible.choices]
        if wrong or not values:
            raise ValueError(
                f"{where}: its condition wants {other} to be {wrong}; choices are {list(possible.choices)}"
            )
        condition[parameter.name] = values
    return condition


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
