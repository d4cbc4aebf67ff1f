"""`fedclust tune`: searches a space of configurations."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from tuning.study import Session, StudyResult

_DESCRIPTION = """\
Searches a space of configurations with Optuna. Every trial is a run as `fedclust fit` makes it, from the same
configuration with some values replaced; trials that look hopeless are stopped after a round.

  fedclust tune --config feddcn_digits --space feddcn --trials 20
  fedclust tune --config feddcn_digits --space my_space.yaml --objective loss --jobs 2 --trainer.max_epochs 10

All options that are not listed below are those of `fedclust fit` and hold for every trial: --config, --trainer.…,
--model.…, --data.…, --seed_everything, --runs_root. The same command again goes on where it stopped."""

_SPACES = """\
spaces (YAML; shipped: {shipped}):
  parameters:
    model.init_args.client.init_args.hidden_dims: {{kind: layers, choices: ["128", "512-256"]}}
    model.init_args.client.init_args.latent_dim:  {{kind: int, low: 3, high: 16}}
    model.init_args.client.init_args.lr:          {{kind: log_float, low: 1e-5, high: 1e-2}}
  kinds: float, log_float, int, log_int (low, high, perhaps step), categorical, layers (choices);
  `when: {{other: [values]}}` draws a parameter only for some values of an earlier one with choices.

objectives (comma separated for several: then a Pareto front, and no pruning):
  without labels: dbi (default), silhouette, silhouette_input, loss (the sum of the unweighted terms)
  with labels, and marked so everywhere: acc, nmi, ari, acc_mean, acc_worst, acc_pooled, f1_macro,
    f1_worst, auc, auc_worst
  any other metric: val/NAME:min, train/NAME:max, …; the test split is never used for selection

exit codes: 0 done, 1 it began and failed or no trial is complete, 2 it could not start, 130 interrupted"""


def run_tune(arguments: Sequence[str]) -> int:
    """Runs `fedclust tune`; returns its exit code, see `fedclust.cli.main`."""
    from fedclust.launch.errors import explain

    try:
        options, rest = _parser().parse_known_args(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)
    debug = "--debug" in rest or os.environ.get("FEDCLUST_DEBUG", "0") not in ("", "0")
    run = _Tune()
    try:
        return run.execute(options, rest)
    except KeyboardInterrupt:
        run.say_interrupted()
        return 130
    except Exception as error:
        if debug:
            raise
        tqdm.write(f"fedclust tune: error: {explain(error)}", file=sys.stderr)
        return run.close(2 if run.session is None else 1)


class _Tune:
    """One command from its options to the last line."""

    def __init__(self) -> None:
        self.session: Session | None = None

    def execute(self, options: argparse.Namespace, rest: list[str]) -> int:
        from tuning.study import Study

        study = Study(
            None, options.space, options.objective, name=options.study_name, storage=options.storage,
            sampler=options.sampler, pruner=options.pruner, startup=options.startup_trials, seed=options.sampler_seed,
            jobs=options.jobs, requeue=options.requeue, rerun_duplicates=options.rerun_duplicates,
            repeats=options.repeats, figures=not options.no_figures, overrides=rest,
        )  # fmt: skip
        self.session = study.prepare(options.trials)
        self._say_plan(options)
        self.session.search()
        result = self.session.finish(lambda text: tqdm.write(text, file=sys.stderr))
        self._say_end(result)
        return self.close(0 if result.summary["best"] is not None else 1)

    def close(self, code: int) -> int:
        """Says where the study lies."""
        if self.session is not None:
            _say(f"study: {self.session.directory}")
        return code

    def say_interrupted(self) -> None:
        if self.session is None:
            return
        _say("interrupted; the same command goes on with the study")
        self.close(130)

    def _say_plan(self, options: argparse.Namespace) -> None:
        from tuning.objectives import label_note

        assert self.session is not None
        blueprint = self.session.blueprint
        names = ", ".join(
            f"{objective} ({label_note(labels)})"
            for objective, labels in zip(blueprint.objectives, blueprint.labels, strict=True)
        )
        pruner = options.pruner if len(blueprint.objectives) == 1 else "none, as there are several objectives"
        loss = f"; loss = {' + '.join(blueprint.terms)}" if any(o.name == "loss" for o in blueprint.objectives) else ""
        tqdm.write(
            f"objective {names}{loss}; each at the round that {blueprint.monitor} selects; sampler {options.sampler}, "
            f"pruner {pruner}",
            file=sys.stderr,
        )

    def _say_end(self, result: StudyResult) -> None:
        from tuning.repeat import repeats_table
        from tuning.summary import table

        _say("\n".join(table(result.summary)))
        if result.summary["best"] is None:
            from tuning.study import no_best

            tqdm.write(f"fedclust tune: error: {no_best(result.summary)}", file=sys.stderr)
        if result.repeats is not None:
            seeds = ", ".join(str(run["seed"]) for run in result.repeats["runs"])
            _say(f"best configuration over seeds {seeds}: mean, sample standard deviation, best")
            assert self.session is not None
            _say("\n".join(repeats_table(result.repeats, self.session.blueprint.label_metrics)))
        _say(_files(result))


def _files(result: StudyResult) -> str:
    names = ["study.json", "trials.csv", "best.yaml", "repeats.json", "figures"]
    return "files: " + ", ".join(name for name in names if (result.directory / name).exists())


def _parser() -> argparse.ArgumentParser:
    from tuning.samplers import PRUNERS, SAMPLERS
    from tuning.space import shipped_spaces

    parser = argparse.ArgumentParser(
        prog="fedclust tune", description=_DESCRIPTION, epilog=_SPACES.format(shipped=", ".join(shipped_spaces())),
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--space", required=True, metavar="NAME", help="what is searched: a YAML file, or the name of a shipped space")
    add(
        "--trials", type=_whole, default=20, metavar="N", help="finished trials that there shall be in all (default 20)"
    )
    add("--objective", default="dbi", metavar="NAMES", help="what is optimised, see below (default dbi)")
    add("--study-name", metavar="NAME", help='name of the study; default "tune_" and the configuration\'s name')
    add(
        "--storage", metavar="URL",
        help="journal:PATH (default: in the study's directory), sqlite:///FILE, or another database URL",
    )  # fmt: skip
    add("--sampler", choices=SAMPLERS, default="tpe", help="how trials are drawn (default tpe)")
    add("--sampler-seed", type=_whole, metavar="SEED", help="seed of the sampler; default is that of the runs")
    add("--pruner", choices=PRUNERS, default="median", help="when trials are stopped early (default median)")
    add(
        "--startup-trials", type=_whole, default=5, metavar="N",
        help="complete trials before the median pruner begins (default 5)",
    )  # fmt: skip
    add("--jobs", type=_whole, default=1, metavar="N", help="trials at once, each in a process of its own (default 1)")
    add("--requeue", action="store_true", help="try the parameters of killed and interrupted trials again")
    add(
        "--rerun-duplicates", action="store_true",
        help="run parameters that were completed before again, instead of taking their value over",
    )  # fmt: skip
    add(
        "--repeats", type=_whole, default=5, metavar="N",
        help="seeds 0 … N-1 under which the best configuration is run and tested at the end; 0 for none (default 5)",
    )  # fmt: skip
    add("--no-figures", action="store_true", help="draw no figures")
    return parser


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def _say(text: Any) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
