"""What a study optimises: metrics by name, label-free unless one that needs labels is named."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fedclust.directions import Direction, better

MODES = get_args(Direction)
LOSS = "loss"
SHORT = (
    "dbi", "silhouette", "silhouette_input", "acc", "nmi", "ari", "acc_mean", "acc_worst", "acc_pooled", "f1_macro",
    "f1_worst", "auc", "auc_worst",
)  # fmt: skip


@dataclass(frozen=True)
class Objective:
    """One metric and its direction.

    Attributes:
        name: "loss", or a logged metric such as "val/dbi".
        mode: "min" or "max".
    """

    name: str
    mode: Direction

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """Optuna's word for the mode."""
        return "minimize" if self.mode == "min" else "maximize"

    @property
    def worst(self) -> float:
        """The value that no other is worse than."""
        return math.inf if self.mode == "min" else -math.inf

    def __str__(self) -> str:
        return f"{self.name}:{self.mode}"


class NoSuchMetricError(ValueError):
    """The objective's metric is not logged by this run; no other trial would have it either."""


def parse_objectives(text: str | Sequence[str]) -> tuple[Objective, ...]:
    """Objectives from their names, comma separated or as a list.

    Args:
        text: "dbi", "loss", "silhouette_input", a metric that needs labels such as "acc", or any "val/NAME" or
            "train/NAME", each perhaps followed by ":min" or ":max".

    Raises:
        ValueError: For a metric of the test split, an unknown name, a missing or wrong direction, a repetition.
    """
    names = [part.strip() for part in (text.split(",") if isinstance(text, str) else text)]
    if not any(names):
        raise ValueError(f"objective must name at least one of {', '.join((LOSS, *SHORT))}, val/NAME, train/NAME")
    objectives = tuple(_parse(name) for name in names)
    metrics = [objective.name for objective in objectives]
    if len(set(metrics)) < len(metrics):
        raise ValueError(f"objective names a metric twice: {', '.join(metrics)}")
    return objectives


def _parse(text: str) -> Objective:
    name, _, mode = text.partition(":")
    if mode and mode not in MODES:
        raise ValueError(f"objective {text!r}: the direction must be min or max, not {mode!r}")
    if name.startswith("test/"):
        raise ValueError(f"objective {name!r}: a study never selects by the test split; use val/{name[5:]}")
    if name not in (LOSS, *SHORT) and not (name.startswith(("val/", "train/")) and name.partition("/")[2]):
        raise ValueError(
            f"objective {name!r} is not known; names are {', '.join((LOSS, *SHORT))}, or val/NAME and train/NAME "
            "followed by :min or :max"
        )
    metric = name if name == LOSS or "/" in name else f"val/{name}"
    usual = better(name)
    if not mode and usual is None:
        raise ValueError(f"objective {name!r} needs a direction: {name}:min or {name}:max")
    return Objective(metric, mode or usual)  # type: ignore[arg-type]


def check_available(objectives: Iterable[Objective], terms: Sequence[str], known: Iterable[str]) -> None:
    """Refuses an objective that the run will not log.

    Args:
        objectives: The objectives.
        terms: The metrics that make up "loss".
        known: All metrics that there will be; empty if that is not known before the first round.

    Raises:
        NoSuchMetricError: Listing what there is.
    """
    names = {name for name in known if name.startswith(("val/", "train/"))}
    if not names:
        return
    for objective in objectives:
        needed = terms if objective.name == LOSS else [objective.name]
        missing = [name for name in needed if name not in names]
        if missing:
            there = ", ".join(sorted(names)) + (f", and loss = {' + '.join(terms)}" if terms else "")
            hint = "; for a method that learns classes say --objective acc_mean" if "val/acc_mean" in names else ""
            raise NoSuchMetricError(
                f"objective {objective.name!r}: {', '.join(missing)} will not be logged by this configuration; there "
                f"are {there}{hint}"
            )


def value_of(objective: Objective, metrics: Mapping[str, Any], terms: Sequence[str]) -> float | None:
    """The objective's value in one round's metrics; None where one of its metrics is missing.

    "loss" is the sum of the unweighted terms: a weighted sum would favour small weights, not good models.
    """
    needed = terms if objective.name == LOSS else [objective.name]
    found = [metrics[name] for name in needed if name in metrics]
    if len(found) < len(needed) or not found:
        return None
    # Strict JSON knows neither NaN nor infinities: summary.json read back has null and strings.
    return math.fsum(math.nan if value is None else float(value) for value in found)


def label_note(uses_labels: bool) -> str:
    """What every output says of an objective."""
    return "uses labels" if uses_labels else "uses no labels"
