"""The runs of `reproduce_pa_cfl.py`: what is varied, at which defaults, and what the library is given for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedclust import Dirichlet, FedAvg, FederatedDataModule, LabelGroups, LocalOnly, PrivateAdaptiveCFL
from fedclust.data.partition import Partition
from fedclust.federation.algorithm import Algorithm
from lightning_modules import Classifier, PrivateAdaptiveClient

# Modules of Table 2 (PB, PC, FC); None for the baselines.
METHODS: dict[str, tuple[bool, bool, bool] | None] = {
    "all_three": (True, True, True),
    "no_privacy": (False, True, True),
    "no_privacy_no_fine": (False, True, False),
    "no_privacy_no_pre": (False, False, True),
    "privacy_no_pre": (True, False, True),
    "privacy_no_fine": (True, True, False),
    "fedavg": None,
    "local_only": None,
}
PARTITIONS = ("dirichlet_0.1", "dirichlet_0.5", "dirichlet_1", "set2")
SET2 = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
# Fewest images of a user under Dirichlet; the paper gives none. Below it a user's test part can be empty.
MIN_SIZE = 10
VAL_FRACTION = 0.1

# The paper's settings below Table 2; digits is for trying the script.
NETWORKS = {"mnist": "cnn", "fashion_mnist": "cnn", "cifar10": "resnet10", "digits": "small_cnn"}
ROUNDS = {"mnist": 100, "fashion_mnist": 100, "cifar10": 200, "digits": 10}
LR = {"mnist": 0.01, "fashion_mnist": 0.01, "cifar10": 0.005, "digits": 0.01}
BATCH_SIZE = {"mnist": 64, "fashion_mnist": 64, "cifar10": 256, "digits": 64}
DEFAULTS: dict[str, Any] = {
    "similarity": "dtw",
    "epsilon": 1.0,
    "sync_period": 10,
    "global_step": "unit",
    "noise": "simulated",
    "clients": 20,
    "round_epochs": 3,
    "threads": 1,
}
METHOD_OPTIONS = ("similarity", "epsilon", "sync_period", "global_step", "noise")
_TAGS = {
    "similarity": "", "epsilon": "eps", "sync_period": "sync", "global_step": "", "noise": "", "clients": "clients",
    "round_epochs": "epochs", "threads": "threads", "lr": "lr", "batch_size": "batch",
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        dataset: Name of the data.
        partition: One of `PARTITIONS`.
        row: One of `METHODS`.
        rounds: Number of rounds.
        seed: Of the partition, the weights and all else.
        given: Every option, those that this row does not use included.
    """

    dataset: str
    partition: str
    row: str
    rounds: int
    seed: int
    given: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """The options that matter for this row."""
        modules = METHODS[self.row]
        unused: set[str] = set()
        if modules is None:
            unused = set(METHOD_OPTIONS)
        else:
            unused |= set() if modules[0] else {"epsilon", "noise"}
            unused |= set() if modules[1] else {"similarity"}
        return {name: value for name, value in self.given.items() if name not in unused}

    def varied(self) -> dict[str, Any]:
        """The options that are not at their defaults, in the order of names; the precision follows the machine."""
        defaults = {**DEFAULTS, "lr": LR[self.dataset], "batch_size": BATCH_SIZE[self.dataset]}
        options = self.options
        return {name: options[name] for name in _TAGS if name in options and options[name] != defaults[name]}

    @property
    def name(self) -> str:
        """Stem of the JSON's name."""
        tags = [f"{_TAGS[name]}{_short(value)}" for name, value in self.varied().items()]
        stem = f"pa_cfl_{self.dataset}_{self.partition}_{self.row}_{self.rounds}r"
        return "_".join([stem, *tags, str(self.seed)])

    def deal(self) -> Partition:
        """How images are dealt to users."""
        users = self.options["clients"]
        if self.partition == "set2":
            if users % len(SET2):
                raise SystemExit(f"--clients must be a multiple of {len(SET2)} for set2, got {users}")
            return LabelGroups(SET2, users // len(SET2))
        return Dirichlet(users, float(self.partition.removeprefix("dirichlet_")), min_size=MIN_SIZE)

    def data(self, root: str | None) -> FederatedDataModule:
        """The data: test parts follow the proportions of each user's own images."""
        return FederatedDataModule(
            self.dataset, partition=self.deal(), root=root, seed=self.seed, val_fraction=VAL_FRACTION
        )

    def algorithm(self) -> Algorithm:
        """The server side."""
        modules, epochs = METHODS[self.row], self.options["round_epochs"]
        if modules is None:
            return {"fedavg": FedAvg, "local_only": LocalOnly}[self.row](epochs)
        own = {name: self.options[name] for name in METHOD_OPTIONS if name in self.options}
        return PrivateAdaptiveCFL(
            epochs, privacy=modules[0], pre_clustering=modules[1], fine_clustering=modules[2], **own
        )

    def client(self) -> Classifier:
        """The client side."""
        kind = Classifier if METHODS[self.row] is None else PrivateAdaptiveClient
        options = self.options
        return kind(network=NETWORKS[self.dataset], lr=options["lr"], batch_size=options["batch_size"])

    def settings(self) -> dict[str, Any]:
        """All that the run was given, for its JSON."""
        plain = (bool, int, float, str, type(None))
        algorithm = {name: value for name, value in vars(self.algorithm()).items() if isinstance(value, plain)}
        algorithm.pop("observer", None)
        partition = self.deal().describe()
        return {
            **self.options, "algorithm": {"class": type(self.algorithm()).__name__, **algorithm},
            "client": {"class": type(self.client()).__name__, **dict(self.client().hparams)},
            "partition": partition, "val_fraction": VAL_FRACTION,
        }  # fmt: skip


def _short(value: Any) -> str:
    """A value inside a file's name."""
    if isinstance(value, float):
        return f"{value:g}".replace("e+0", "e").replace("e+", "e")
    return str(value).replace(".", "")
