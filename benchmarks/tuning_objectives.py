"""Which label-free objective finds configurations that also cluster well: one study of the digits for each.

    python benchmarks/tuning_objectives.py                                       # dbi and silhouette_input, 20 trials
    python benchmarks/tuning_objectives.py --trials 4 --repeats 2 --objectives loss --epochs 2 --out somewhere
    python benchmarks/tuning_objectives.py --studies runs/digits,runs/other      # reads what `fedclust tune` has left

FedDCN on the digits, the space of the paper's Table I. Labels are only looked at afterwards. complete: trials that
were neither pruned nor failed. ACC of trials: on validation rows, of the complete trials, least, median and largest.
rank correlation: Spearman's, of the objective (turned so that more is better) with validation ACC and NMI over the
complete trials. ACC, NMI: test, of the best trial's configuration under several seeds, mean ± sample standard
deviation. minutes: of the study, which ends with the repetitions; `--table` writes the table again from the JSON.
Writes tuning_objectives.json and tuning_objectives.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import common
from scipy.stats import spearmanr

import tuning

HEADERS = [
    "objective", "complete", "pruned", "best value", "ACC of trials", "correlation with ACC", "with NMI", "seeds",
    "ACC", "NMI", "minutes",
]  # fmt: skip


def searched(objective: str, options: argparse.Namespace) -> Path:
    """Runs one study; returns its directory."""
    overrides = [f"--runs_root={options.work}"]
    overrides += [f"--trainer.max_epochs={options.epochs}"] if options.epochs else []
    study = tuning.Study(
        "feddcn_digits", "feddcn", objective, name=f"objective_{objective}", jobs=options.jobs, repeats=options.repeats,
        overrides=overrides, figures=False,
    )  # fmt: skip
    return study.run(options.trials).directory


def found(directory: Path) -> dict[str, Any]:
    """What a study's files say."""
    study = json.loads((directory / "study.json").read_text())
    name, _, mode = str(study["objectives"][0]).rpartition(":")
    selected = [json.loads(path.read_text()) for path in sorted(directory.glob("trial_*/*/summary.json"))]
    metrics = [run["metrics"] for run in selected if run["status"] != "pruned" and "val/acc" in run["metrics"]]
    return {
        "objective": name,
        "mode": mode,
        "counts": study["counts"],
        "best": study["best"]["values"],
        "params": study["best"]["params"],
        "seconds": study["seconds"],
        "trials": [{key: run.get(key) for key in (name, "val/acc", "val/nmi")} for run in metrics],
        "repeats": json.loads((directory / "repeats.json").read_text())["runs"],
    }


def cells(row: dict[str, Any]) -> list[Any]:
    """One line of the table."""
    sign = 1 if row["mode"] == "max" else -1
    values = [sign * run[row["objective"]] for run in row["trials"]]
    accuracies = [run["val/acc"] for run in row["trials"]]
    ranks = [
        f"{spearmanr(values, [run[name] for run in row['trials']]).statistic:.2f}" if len(values) > 2 else ""
        for name in ("val/acc", "val/nmi")
    ]
    tested = [run["metrics"] for run in row["repeats"] if run["status"] == "completed"]
    spread = f"{min(accuracies):.3f}, {median(accuracies):.3f}, {max(accuracies):.3f}"
    return [
        row["objective"], row["counts"]["complete"], row["counts"]["pruned"], f"{next(iter(row['best'].values())):.3f}",
        spread, *ranks, len(tested),
        *(common.spread([run[f"test/{name}"] for run in tested]) for name in ("acc", "nmi")),
        f"{(row['seconds'] + sum(run['seconds'] for run in row['repeats'])) / 60:.0f}",
    ]  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    """The page of results."""
    text = (__doc__ or "").split("\n\n")[2]
    table = "\n".join([*common.heading(HEADERS), *(common.row(cells(row)) for row in report["studies"])])
    return f"# Objectives of studies\n\n{text}\n\nVersions: {report['versions']}.\n\n{table}\n"


def main() -> None:
    """Runs or reads the studies, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", type=common.words, default=["dbi", "silhouette_input"])
    parser.add_argument("--studies", type=common.words, default=[], help="directories of finished studies")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="rounds; default: the configuration's")
    parser.add_argument("--work", type=Path, default=common.WORK)
    parser.add_argument("--out", type=Path, default=common.RESULTS)
    parser.add_argument("--table", action="store_true", help="only write the Markdown from the JSON")
    options = parser.parse_args()
    path = options.out / "tuning_objectives.json"
    if options.table:
        report = json.loads(path.read_text())
    else:
        directories = [Path(name) for name in options.studies] or [
            searched(name, options) for name in options.objectives
        ]
        report = {"versions": common.versions(), "studies": [found(directory) for directory in directories]}
        common.write_json(path, report)
    path.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    main()
