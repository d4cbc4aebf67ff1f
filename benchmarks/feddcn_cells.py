"""The cells of FedDCN's table: the shipped configuration and the clients of each."""

from __future__ import annotations

import argparse
from typing import Any

import yaml
from common import ROOT

from fedclust import Dirichlet, FederatedDataModule


def settings(dataset: str, scenario: str) -> dict[str, Any]:
    """The parsed configuration of one cell; digits has one scenario."""
    stem = "feddcn_digits" if dataset == "digits" else f"feddcn_{dataset.replace('_mnist', '')}_{scenario}"
    return dict(yaml.safe_load((ROOT / "configs" / f"{stem}.yaml").read_text()))


def make_data(options: argparse.Namespace, seed: int) -> FederatedDataModule:
    """The clients of one cell; the number of clients is the command's."""
    given = settings(options.dataset, options.scenario)["data"]["init_args"]["partition"]["init_args"]
    partition = Dirichlet(**{**given, "n_clients": options.clients})
    return FederatedDataModule(source=options.dataset, root=options.root, partition=partition, seed=seed)
