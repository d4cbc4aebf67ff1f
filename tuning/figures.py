"""History, importances, slices and the Pareto front, by Optuna's own plotting, as PNG and HTML."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import optuna

from tuning.blueprint import Blueprint
from tuning.objectives import label_note
from tuning.summary import has_spread, value_at

_INSTALL = "pip install 'fedclust[figures]'"


def draw_figures(study: optuna.Study, blueprint: Blueprint, directory: Path) -> tuple[list[str], list[str]]:
    """Draws what can be drawn; nothing here fails a study.

    Returns:
        Names of the files, and notes on what could not be drawn and why.
    """
    files: list[str] = []
    notes: list[str] = []
    if not all(has_spread(study, index) for index in range(len(blueprint.objectives))):
        notes.append("no figure of importances: they need complete trials with different values")
    for kind, draw, ending in (("matplotlib", _png, "png"), ("plotly", _html, "html")):
        try:
            __import__(kind)
        except ImportError:
            notes.append(f"no {ending.upper()} figures: {kind} is not installed; {_INSTALL}")
            continue
        directory.mkdir(parents=True, exist_ok=True)
        for name, function, title, options in _plan(study, blueprint):
            path = directory / f"{name}.{ending}"
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    draw(function, study, options, title, path)
                files.append(path.name)
            except Exception as error:
                text = " ".join(str(error).split()) or type(error).__name__
                notes.append(f"figure {path.name} could not be drawn: {text[:200]}")
    return files, notes


def _plan(study: optuna.Study, blueprint: Blueprint) -> list[tuple[str, str, str, dict[str, Any]]]:
    """File name, Optuna's function, title and options of every figure."""
    plan: list[tuple[str, str, str, dict[str, Any]]] = []
    several = len(blueprint.objectives) > 1
    for index, objective in enumerate(blueprint.objectives):
        end = "_" + objective.name.replace("/", "_") if several else ""
        title = f"{objective.name} ({objective.mode}, {label_note(blueprint.labels[index])})"
        options: dict[str, Any] = {"target_name": objective.name}
        if several:
            options["target"] = value_at(index)
        plan.append((f"history{end}", "plot_optimization_history", title, options))
        if has_spread(study, index):
            plan.append((f"importances{end}", "plot_param_importances", title, options))
        plan.append((f"slice{end}", "plot_slice", title, options))
    if 1 < len(blueprint.objectives) <= 3:
        names = [objective.name for objective in blueprint.objectives]
        title = f"{', '.join(names)} ({label_note(blueprint.uses_labels)})"
        plan.append(("pareto_front", "plot_pareto_front", title, {"target_names": names}))
    return plan


def _png(name: str, study: optuna.Study, options: dict[str, Any], title: str, path: Path) -> None:
    if "matplotlib.pyplot" not in sys.modules:
        import matplotlib

        matplotlib.use("agg")  # files only: no window, and no need of a display
    import matplotlib.pyplot as plt
    import numpy as np
    from optuna.visualization import matplotlib as plots

    before = set(plt.get_fignums())
    try:
        axes = getattr(plots, name)(study, **options)
        figure = np.ravel(axes)[0].figure
        figure.suptitle(title)
        figure.savefig(path, dpi=120, bbox_inches="tight")
    finally:
        for number in set(plt.get_fignums()) - before:
            plt.close(number)


def _html(name: str, study: optuna.Study, options: dict[str, Any], title: str, path: Path) -> None:
    from optuna import visualization as plots

    figure = getattr(plots, name)(study, **options)
    figure.update_layout(title=title)
    figure.write_html(str(path), include_plotlyjs="directory")
