"""Markdown tables of the PA-CFL runs beside the paper's Table 2."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import common
from pa_cfl_cells import METHODS, PARTITIONS, ROUNDS

# Table 2: mean user accuracy in %, over five seeds; per row Dirichlet .1 / .5 / 1 and Set-2. Where the paper's text has
# no deviation there is none.
PAPER = {
    "mnist": {
        "all_three": ("98.05 ± 0.14", "98.41 ± 0.25", "98.02 ± 0.27", "99.70 ± 0.05"),
        "no_privacy": ("99.41 ± 0.01", "98.84 ± 0.01", "98.23 ± 0.02", "99.74 ± 0.01"),
        "no_privacy_no_fine": ("96.84 ± 0.13", "97.40 ± 0.10", "98.08 ± 0.11", "99.43 ± 0.08"),
        "no_privacy_no_pre": ("98.08 ± 0.01", "97.33 ± 0.02", "98.03 ± 0.02", "99.52 ± 0.01"),
        "privacy_no_pre": ("95.52 ± 0.26", "93.61 ± 0.43", "96.88 ± 0.41", "99.22 ± 0.18"),
        "privacy_no_fine": ("92.89 ± 0.23", "92.75 ± 0.48", "95.77 ± 0.39", "99.04 ± 0.14"),
    },
    "fashion_mnist": {
        "all_three": ("91.64 ± 0.17", "88.69 ± 0.27", "89.11 ± 0.32", "98.57 ± 0.13"),
        "no_privacy": ("98.87 ± 0.01", "91.55 ± 0.01", "90.76 ± 0.01", "98.87 ± 0.00"),
        "no_privacy_no_fine": ("91.89 ± 0.09", "91.24 ± 0.12", "90.63 ± 0.08", "98.74 ± 0.05"),
        "no_privacy_no_pre": ("96.43 ± 0.06", "89.72 ± 0.04", "88.87 ± 0.04", "98.59 ± 0.04"),
        "privacy_no_pre": ("85.85 ± 0.39", "85.6 ± 0.40", "86.07 ± 0.46", "98.16 ± 0.17"),
        "privacy_no_fine": ("83.37 ± 0.35", "83.83 ± 0.42", "84.49 ± 0.53", "97.69 ± 0.22"),
    },
    "cifar10": {
        "all_three": ("85.63 ± 0.09", "63.81", "58.47", "85.67"),
        "no_privacy": ("87.49 ± 0.01", "68.39 ± 0.01", "62.51 ± 0.03", "87.48 ± 0.01"),
        "no_privacy_no_fine": ("72.46 ± 0.16", "65.82 ± 0.13", "61.73 ± 0.11", "74.86 ± 0.07"),
        "no_privacy_no_pre": ("86.43 ± 0.04", "66.95 ± 0.06", "61.23 ± 0.07", "85.58 ± 0.04"),
        "privacy_no_pre": ("83.78 ± 0.38", "62.32 ± 0.55", "56.25 ± 0.76", "83.42 ± 0.12"),
        "privacy_no_fine": ("82.16 ± 0.40", "59.76 ± 0.63", "51.03 ± 0.85", "80.29 ± 0.17"),
    },
}
INTRO = """# PA-CFL beside the paper

Mean user accuracy on the users' test parts in %, mean ± sample standard deviation over our seeds; the paper's figures
are means over five seeds. **Last round** is the headline: the number of rounds is fixed beforehand, as in the paper.
**Best by val** is the test accuracy at the best round by mean validation accuracy. No test figure chooses anything.
A tenth of each user's images is its validation part, so users train on nine tenths of what the paper's train on.
Worst user, F1 (macro) and AUC are those of the last round, AUC as the mean over users with two classes or more.
ARI: final clusters of the last round against the planted groups, where there are any. Clusters: pre-clusters → final
clusters in the last round (mean over seeds). `dtw` is exact here; the paper's experiments ran FastDTW.

ε: what the ledger can honestly state for the worst user, per round / over all rounds, with the bound that gives it, for
the seed that ran longest. It is that of the mechanism with secure noise and speaks of the less important coordinates
only: sequences, norms and important values carry no differential privacy at all. Runs with `noise` simulated took their
noise from the run's seed, which makes them repeatable and protects nobody. A run that diverged has an ε total of the
rounds that it finished, and says so.

Seconds: wall time of all stages until the last round or the divergence, mean over the seeds: local training, servers,
the evaluation of validation rows that selects the best round, and, in brackets, the evaluation of test rows for these
tables alone. Without loading data and writing checkpoints; other programs ran beside some runs, so that rows of
different loads do not compare. The [last table](#what-the-runs-were-made-with) lists versions, machines and loads.

Written by `python benchmarks/reproduce_pa_cfl.py --table`.
"""
MAIN = (
    "data", "partition", "row", "rounds", "seeds", "paper (rounds)", "last round", "best by val", "worst user", "F1",
    "AUC", "clusters", "ARI", "ε round / total (bound)", "seconds (test)", "precision", "commit",
)  # fmt: skip
SWEEP = (
    "data", "partition", "row", "other settings", "rounds", "seeds", "ε₀", "ε of one round (bound)",
    "ε of all rounds (bound)", "δ", "last round", "best by val", "worst user", "clusters", "ARI",
    "precision", "commit",
)  # fmt: skip
OTHER = (
    "data", "partition", "row", "settings", "rounds", "seeds", "last round", "best by val", "worst user", "clusters",
    "ARI", "ε round / total (bound)", "seconds (test)", "precision", "commit",
)  # fmt: skip
MADE_WITH = ("commit", "precision", "threads", "Python", "torch", "numpy", "cores", "load at the start", "runs")
Runs = list[dict[str, Any]]


def write_table(folder: Path) -> str:
    """Writes `pa_cfl.md` from all JSONs of the folder and returns its text."""
    found: dict[tuple[Any, ...], Runs] = defaultdict(list)
    for path in sorted(folder.glob("pa_cfl_*.json")):
        run = json.loads(path.read_text())
        found[_place(run), json.dumps(run["varied"])].append(run)
    groups = [sorted(found[key], key=lambda run: run["seed"]) for key in sorted(found)]
    plain = [runs for runs in groups if not runs[0]["varied"]]
    methods = [runs for runs in plain if METHODS[runs[0]["row"]] is not None]
    baselines = [runs for runs in plain if METHODS[runs[0]["row"]] is None]
    text = "\n".join([
        INTRO,
        *_section("Table 2", MAIN, [_line(MAIN, runs) for runs in methods]),
        *_section("FedAvg and LocalOnly", MAIN, [_line(MAIN, runs) for runs in baselines]),
        *_section("ε₀: where learning starts with privacy on", SWEEP, _sweeps(groups)),
        *_section("Similarities and other settings", OTHER, _others(groups)),
        *_section("What the runs were made with", MADE_WITH, _made_with([run for runs in groups for run in runs])),
    ])  # fmt: skip
    (folder / "pa_cfl.md").write_text(text)
    return text


def _place(run: dict[str, Any]) -> tuple[int, int, int, int]:
    """Where a run stands in a table."""
    order = (list(ROUNDS).index(run["dataset"]), PARTITIONS.index(run["partition"]), list(METHODS).index(run["row"]))
    return (*order, run["rounds"])


def _section(title: str, header: tuple[str, ...], lines: list[str]) -> list[str]:
    if not lines:
        return []
    return [f"## {title}", "", *common.heading(header), *lines, ""]


def _sweeps(groups: list[Runs]) -> list[str]:
    """Lines of every set of runs that differ in ε₀ alone."""
    sets: dict[tuple[Any, ...], list[Runs]] = defaultdict(list)
    for runs in groups:
        if "epsilon" in runs[0]["settings"]:
            sets[_place(runs[0]), _setting(runs[0], without="epsilon")].append(runs)
    lines = []
    for members in sets.values():
        if any("epsilon" in runs[0]["varied"] for runs in members):
            ordered = sorted(members, key=lambda runs: runs[0]["settings"]["epsilon"])
            lines += [_line(SWEEP, runs) for runs in ordered]
    return lines


def _others(groups: list[Runs]) -> list[str]:
    """Lines of all runs that vary more than ε₀, each set after the run at the defaults that it compares with."""
    sets: dict[tuple[Any, ...], list[Runs]] = defaultdict(list)
    for runs in groups:
        if set(runs[0]["varied"]) != {"epsilon"}:
            sets[_place(runs[0])].append(runs)
    lines = []
    for members in sets.values():
        if any(runs[0]["varied"] for runs in members):
            lines += [_line(OTHER, runs) for runs in sorted(members, key=lambda runs: len(runs[0]["varied"]))]
    return lines


def _line(header: tuple[str, ...], runs: Runs) -> str:
    """One row of a table: the columns of `header` for the runs of one cell."""
    first = runs[0]
    columns = {
        "data": first["dataset"], "partition": first["partition"], "row": first["row"],
        "rounds": str(first["rounds"]), "seeds": ",".join(str(run["seed"]) for run in runs),
        "paper (rounds)": _paper(first), "settings": _setting(first) or "defaults",
        "other settings": _setting(first, without="epsilon") or "defaults",
        "last round": _last(runs), "best by val": _percent(runs, "best_by_val", "acc_mean"),
        "worst user": _percent(runs, "final", "acc_worst"), "F1": _percent(runs, "final", "f1_macro"),
        "AUC": _percent(runs, "final", "auc"), "clusters": _clusters(runs), "ARI": _ari(runs),
        "ε₀": f"{first['settings'].get('epsilon', 0):g}", "ε round / total (bound)": _epsilons(runs),
        "ε of one round (bound)": _epsilon(runs, "round"), "ε of all rounds (bound)": _epsilon(runs, "total"),
        "δ": f"{first['privacy']['total']['delta']:g}" if first["privacy"] else "",
        "seconds (test)": _seconds(runs), "precision": _distinct(run["settings"]["precision"] for run in runs),
        "commit": _distinct(run["versions"]["commit"] for run in runs),
    }  # fmt: skip
    return common.row(columns[name] for name in header)


def _paper(run: dict[str, Any]) -> str:
    figures = PAPER.get(run["dataset"], {}).get(run["row"])
    return f"{figures[PARTITIONS.index(run['partition'])]} ({ROUNDS[run['dataset']]})" if figures else ""


def _setting(run: dict[str, Any], without: str = "") -> str:
    return ", ".join(f"{name} = {value}" for name, value in run["varied"].items() if name != without)


def _last(runs: Runs) -> str:
    """Accuracy after the last round; where a run diverged, in which round, and the last figure before it."""
    parts = [_percent(runs, "final", "acc_mean")]
    for run in runs:
        if run["diverged"]:
            text = f"seed {run['seed']} diverged in round {run['diverged']['round']}"
            measured = [row for row in run["history"] if "test/acc_mean" in row]
            if measured:
                text += f" ({100 * measured[-1]['test/acc_mean']:.2f} after round {measured[-1]['round']:.0f})"
            parts.append(text)
    return "; ".join(part for part in parts if part)


def _percent(runs: Runs, where: str, name: str) -> str:
    values = [100 * run[where][name] for run in runs if run[where] and name in run[where]]
    return common.spread(values, 2) if values else ""


def _clusters(runs: Runs) -> str:
    ends = [run["history"][-1] for run in runs if run["history"]]
    if not ends or "clusters/final" not in ends[0]:
        return ""
    return " → ".join(f"{mean(end[name] for end in ends):.1f}" for name in ("clusters/pre", "clusters/final"))


def _ari(runs: Runs) -> str:
    values = [
        run["history"][-1]["clients/ari"] for run in runs if run["history"] and "clients/ari" in run["history"][-1]
    ]
    return common.spread(values) if values else ""


def _epsilon(runs: Runs, which: str) -> str:
    """Of the seed that ran longest; another seed's clusters change only the bound by shuffling."""
    run = max(runs, key=lambda run: run["privacy"]["rounds"] if run["privacy"] else 0)
    if not run["privacy"]:
        return ""
    entry, rounds = run["privacy"][which], run["privacy"]["rounds"]
    text = f"{entry['epsilon']:.4g} ({entry['smallest']})"
    if which == "total" and rounds != run["rounds"]:
        text += f" after {rounds} round{'s' if rounds > 1 else ''}"
    return text


def _epsilons(runs: Runs) -> str:
    return f"{_epsilon(runs, 'round')} / {_epsilon(runs, 'total')}" if _epsilon(runs, "round") else ""


def _seconds(runs: Runs) -> str:
    test = mean(run["stages"].get("test", 0.0) for run in runs)
    return f"{mean(run['seconds'] for run in runs):.0f} ({test:.0f})"


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _made_with(runs: Runs) -> list[str]:
    """A line for every set of runs with the same versions, precision, threads and cores."""
    sets: dict[tuple[str, ...], list[float]] = defaultdict(list)
    counts: dict[tuple[str, ...], int] = defaultdict(int)
    for run in runs:
        versions, machine = run["versions"], run.get("machine", {})
        key = (
            versions["commit"], run["settings"]["precision"], str(run["settings"]["threads"]), versions["python"],
            versions["torch"], versions["numpy"], str(machine.get("cores", "not noted")),
        )  # fmt: skip
        counts[key] += 1
        if machine.get("load at the start") is not None:
            sets[key].append(machine["load at the start"])
    lines = []
    for key in sorted(counts):
        load = f"{min(sets[key])} to {max(sets[key])}" if sets[key] else "not noted"
        lines.append(common.row([*key, load, counts[key]]))
    return lines
