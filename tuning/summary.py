"""What a study leaves: study.json, trials.csv, best.yaml, and the table that ends it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from fedclust.report.files import plain, write_csv, write_json, write_text
from fedclust.report.summary import versions
from tuning.blueprint import Blueprint
from tuning.ledger import STOPPED, Ledger, best_of, counts, reason_of, reused_from, round_of, run_of, worker_of
from tuning.objectives import label_note
from tuning.processes import alive

_SHOWN_FAILURES = 5
_TRIALS_PER_PARAMETER = 5


def count_trials(trials: Sequence[FrozenTrial]) -> dict[str, Any]:
    """How many trials ended how; "counted" of them count towards the total that was asked for."""
    states = Counter(trial.state for trial in trials)
    reasons = Counter(reason_of(trial) for trial in trials if trial.state == TrialState.FAIL)
    killed, interrupted = reasons.pop("killed", 0), reasons.pop("interrupted", 0)
    running = [trial for trial in trials if trial.state == TrialState.RUNNING]
    return {
        "counted": sum(counts(trial) for trial in trials if trial.state.is_finished()),
        "complete": states[TrialState.COMPLETE],
        "reused": sum(reused_from(trial) is not None for trial in trials),
        "pruned": states[TrialState.PRUNED],
        "failed": sum(reasons.values()),
        "failed_by_reason": {str(reason): count for reason, count in sorted(reasons.items(), key=str)},
        "killed": killed,
        "interrupted": interrupted,
        "running": len(running),
        "running_elsewhere": sum(alive(worker_of(trial)) is None for trial in running if worker_of(trial)),
        "waiting": states[TrialState.WAITING],
    }


def summarise(ledger: Ledger, asked: int, seconds: float, status: str) -> dict[str, Any]:
    """The content of study.json."""
    trials, blueprint = ledger.trials(), ledger.blueprint
    best = best_of(trials, blueprint)
    importances, notes = _importances(ledger.study, blueprint)
    settings = ledger.settings
    return {
        "name": ledger.name,
        "status": status,
        "objectives": [str(objective) for objective in blueprint.objectives],
        "uses_labels": blueprint.uses_labels,
        "uses_labels_by_objective": dict(zip(map(str, blueprint.objectives), blueprint.labels, strict=True)),
        "loss": list(blueprint.terms),
        "monitor": blueprint.monitor,
        "asked": asked,
        "counts": count_trials(trials),
        "best": None if best is None else _entry(best, blueprint),
        "front": [_entry(trial, blueprint) for trial in ledger.front()] if len(blueprint.objectives) > 1 else None,
        "failures": [_failure(trial) for trial in trials if trial.state == TrialState.FAIL],
        "importances": importances,
        "saved": _saved(trials),
        "space": blueprint.space.source,
        "sampler": settings.sampler,
        "pruner": settings.pruner if len(blueprint.objectives) == 1 else "none (several objectives are never pruned)",
        "startup_trials": settings.startup,
        "jobs": settings.jobs,
        "storage": ledger.storage.shown,
        "seeds": {"sampler": blueprint.seed, "runs": blueprint.runs_seed},
        "versions": {**versions(), "optuna": version("optuna")},
        "seconds": seconds,
        "seconds_of_trials": sum(float(run.get("seconds") or 0) for run in _own_runs(trials)),
        "notes": notes,
    }  # fmt: skip


def write_study(directory: Path, summary: Mapping[str, Any]) -> None:
    """Writes study.json."""
    write_json(directory / "study.json", summary)


def write_trials(directory: Path, trials: Sequence[FrozenTrial], blueprint: Blueprint) -> None:
    """Writes trials.csv: one row per trial; the objectives' columns say which of them use labels."""
    columns = _value_columns(blueprint)
    names = [parameter.name for parameter in blueprint.space.parameters]
    rows = []
    for trial in trials:
        run = run_of(trial)
        values = trial.values if trial.state == TrialState.COMPLETE else None
        rows.append({
            "trial": trial.number, "state": trial.state.name.lower(),
            "reason": reason_of(trial) or "", "reused": "" if reused_from(trial) is None else reused_from(trial),
            **dict(zip(columns, values or [], strict=False)),
            "rounds": run.get("rounds") or round_of(trial), "seconds": run.get("seconds", ""),
            **{f"params/{name}": trial.params.get(name, "") for name in names}, "directory": run.get("directory") or "",
        })  # fmt: skip
    every = [
        "trial", "state", "reason", "reused", *columns, "rounds", "seconds", *(f"params/{name}" for name in names),
        "directory",
    ]  # fmt: skip
    write_csv(directory / "trials.csv", rows, every)


def write_best(directory: Path, ledger: Ledger, best: FrozenTrial) -> Path:
    """Writes best.yaml, the best trial's full configuration."""
    blueprint = ledger.blueprint
    text = blueprint.resolved(directory / "base.yaml", best.params, f"{ledger.name}_best")
    values = ", ".join(
        f"{objective} = {value!r} ({label_note(labels)})"
        for objective, value, labels in zip(blueprint.objectives, best.values, blueprint.labels, strict=True)
    )
    path = directory / "best.yaml"
    write_text(path, f"# Best trial of the study {ledger.name}: trial {best.number}, {values}.\n{text}")
    return path


def table(summary: Mapping[str, Any]) -> list[str]:
    """The lines that end a study: best trial, counts, failures, importances, notes."""
    note = label_note(summary["uses_labels"])
    lines = [f"study {summary['name']}: {', '.join(summary['objectives'])}, {note}; {summary['status']}"]
    lines.append("-" * len(lines[0]))
    lines.append("  trials       " + _counts_line(summary["counts"], summary["asked"]))
    best = summary["best"]
    if best is None:
        lines.append("  best         none: no trial is complete")
    else:
        first = "best" if summary["front"] is None else "best by the first objective"
        lines.append(f"  {first:<11}  trial {best['trial']}: {_values(best['values'])} ({note})")
        lines += [f"    {name} = {value}" for name, value in best["params"].items()]
    if summary["front"]:
        lines.append(f"  Pareto front {len(summary['front'])} trials ({note})")
        lines += [f"    trial {entry['trial']}: {_values(entry['values'])}" for entry in summary["front"]]
    lines += _failure_lines(summary["failures"])
    for objective, found in (summary["importances"] or {}).items():
        shown = ", ".join(f"{name} {share:.2f}" for name, share in found.items())
        lines.append(f"  importances  of {objective}: {shown}")
    saved = summary["saved"]
    embeddings = saved["embeddings_reused"] + saved["embeddings_computed"]
    again = f"embeddings {saved['embeddings_reused']} of {embeddings} reused, " if embeddings else ""
    lines.append(f"  saved        {again}data {saved['data_reused']} times reused")
    return lines + [f"  note: {text}" for text in summary["notes"]]


def _entry(trial: FrozenTrial, blueprint: Blueprint) -> dict[str, Any]:
    run = run_of(trial)
    again = reused_from(trial)
    return {
        "trial": trial.number,
        "values": dict(zip(map(str, blueprint.objectives), trial.values, strict=True)),
        "uses_labels": blueprint.uses_labels,
        "params": trial.params,
        "metrics": {name: value for name, value in run.get("metrics", {}).items() if not name.startswith("test/")},
        "directory": run.get("directory"),
        **({} if again is None else {"reused": again}),
    }


def _value_columns(blueprint: Blueprint) -> list[str]:
    return [
        f"{objective.name} ({objective.mode}{', uses labels' if labels else ''})"
        for objective, labels in zip(blueprint.objectives, blueprint.labels, strict=True)
    ]


def _importances(study: optuna.Study, blueprint: Blueprint) -> tuple[dict[str, dict[str, float]] | None, list[str]]:
    """Share of each parameter in the spread of each objective, and a note where it cannot be computed."""
    found: dict[str, dict[str, float]] = {}
    for index, objective in enumerate(blueprint.objectives):
        if not has_spread(study, index):
            return None, ["importances could not be computed: they need complete trials with different values"]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                evaluator = optuna.importance.FanovaImportanceEvaluator(seed=blueprint.seed % 2**32)
                shares = optuna.importance.get_param_importances(study, evaluator=evaluator, target=value_at(index))
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            return None, [f"importances could not be computed: {text[:200]}"]
        if not shares:
            return None, ["importances could not be computed: no parameter is common to all complete trials"]
        found[str(objective)] = {name: float(share) for name, share in shares.items()}
    return plain(found), _few(study, found)


def _few(study: optuna.Study, found: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A note where importances rest on less than five complete trials per parameter."""
    complete = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
    most = max(map(len, found.values()))
    if complete >= _TRIALS_PER_PARAMETER * most:
        return []
    return [f"importances rest on {complete} complete trials for {most} parameters: a hint at best"]


def has_spread(study: optuna.Study, index: int) -> bool:
    """Whether the complete trials differ in an objective; if not, no parameter matters more than another."""
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return len({trial.values[index] for trial in complete}) > 1


def value_at(index: int) -> Callable[[FrozenTrial], float]:
    """Picks one objective's value out of a trial."""
    return lambda trial: float(trial.values[index])


def _saved(trials: Sequence[FrozenTrial]) -> dict[str, int]:
    names = ("embeddings_reused", "embeddings_computed", "data_reused")
    runs = [run.get("saved", {}) for run in _own_runs(trials)]
    return {name: sum(int(run.get(name, 0)) for run in runs) for name in names}


def _own_runs(trials: Sequence[FrozenTrial]) -> list[dict[str, Any]]:
    """What trials' own runs left, those whose values were taken over left out."""
    return [run_of(trial) for trial in trials if reused_from(trial) is None]


def _failure(trial: FrozenTrial) -> dict[str, Any]:
    detail = run_of(trial).get("detail")
    return {"trial": trial.number, "reason": reason_of(trial), "detail": detail, "params": trial.params}


def _counts_line(counted: Mapping[str, Any], asked: int) -> str:
    why = ", ".join(f"{count} {reason}" for reason, count in counted["failed_by_reason"].items())
    parts = [f"{counted['counted']} of {asked}: {counted['complete']} complete"]
    parts[0] += f" ({counted['reused']} reused)" if counted["reused"] else ""
    parts += [f"{counted['pruned']} pruned", f"{counted['failed']} failed" + (f" ({why})" if why else "")]
    for name in ("killed", "interrupted", "running", "waiting"):
        if counted[name]:
            parts.append(f"{counted[name]} {name}")
    if counted["running_elsewhere"]:
        parts[-1] += f" ({counted['running_elsewhere']} of the running ones on other hosts)"
    return ", ".join(parts)


def _failure_lines(failures: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        f"  {'stopped' if entry['reason'] in STOPPED else 'failed':<11}  trial {entry['trial']}: {entry['reason']}"
        + (f", {entry['detail']}" if entry["detail"] else "")
        + f"; {entry['params']}"
        for entry in failures[:_SHOWN_FAILURES]
    ]
    more = len(failures) - _SHOWN_FAILURES
    return [*lines, f"               and {more} more in study.json"] if more > 0 else lines


def _values(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} = {value:.5g}" for name, value in values.items())
