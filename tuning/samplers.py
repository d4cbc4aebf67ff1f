"""Samplers and pruners by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, NSGAIISampler, QMCSampler, RandomSampler, TPESampler

from fedclust.checks import choice
from fedclust.random import seed_for

SAMPLERS = ("tpe", "random", "qmc", "nsgaii")
PRUNERS = ("median", "hyperband", "successive_halving", "none")


def make_sampler(name: str, seed: int, ordinal: int, jobs: int = 1) -> BaseSampler:
    """The sampler that draws one trial, seeded by the study's seed and the trial's place in the study.

    A new one for every trial, so that a study that was stopped and resumed draws what it would have drawn.

    Args:
        name: One of `SAMPLERS`.
        seed: The study's seed.
        ordinal: How many trials were counted before this one.
        jobs: Trials that run at once; TPE then takes running ones for bad, so that they are not drawn again.
    """
    choice("sampler", name, SAMPLERS)
    own = seed_for(seed, "tuning", ordinal) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "random":
            return RandomSampler(seed=own)
        if name == "nsgaii":
            return NSGAIISampler(seed=own)
        if name == "qmc":
            # The sequence is one for the whole study; only what falls outside it is drawn by itself.
            whole = seed_for(seed, "tuning", "sequence") % 2**32
            return QMCSampler(
                seed=whole, scramble=True, independent_sampler=RandomSampler(seed=own), warn_independent_sampling=False
            )
        return TPESampler(seed=own, constant_liar=jobs > 1)


def make_pruner(name: str, startup: int, rounds: int | None) -> BasePruner:
    """A pruner by its name.

    Args:
        name: One of `PRUNERS`.
        startup: "median": complete trials before the first one is pruned.
        rounds: Most rounds that a trial runs, where that is known.
    """
    makers: dict[str, Callable[[], BasePruner]] = {
        "median": lambda: MedianPruner(n_startup_trials=startup),
        "hyperband": lambda: HyperbandPruner(min_resource=1, max_resource=rounds or "auto"),
        "successive_halving": SuccessiveHalvingPruner,
        "none": NopPruner,
    }
    choice("pruner", name, PRUNERS)
    return makers[name]()
