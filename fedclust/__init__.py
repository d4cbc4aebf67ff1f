"""fedclust: federated clustering.

Names are imported on first use, so that importing a leaf such as `fedclust.data.partition` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedclust.algorithms.fedavg import FedAvg
    from fedclust.algorithms.feddcn import FedDCN
    from fedclust.algorithms.flameche import FLAMECHE
    from fedclust.algorithms.fmcl import FMCL
    from fedclust.algorithms.local_only import LocalOnly
    from fedclust.algorithms.pa_cfl import PrivateAdaptiveCFL
    from fedclust.api import cluster, federate
    from fedclust.data.datamodule import FederatedDataModule
    from fedclust.data.encoded import Encoded
    from fedclust.data.partition import Dirichlet, Iid, LabelGroups, Natural, Shards
    from fedclust.data.transforms import LabelSwaps, Rotations
    from fedclust.federation.algorithm import Algorithm, Server, State
    from fedclust.federation.averaging import WeightedAverage, weighted_average
    from fedclust.federation.backend import Backend, InProcess
    from fedclust.federation.client import ClientModule, action
    from fedclust.federation.context import ClientContext
    from fedclust.federation.loop import FederatedLoop
    from fedclust.federation.processes import Processes
    from fedclust.federation.vectorised import Vectorised
    from fedclust.metrics import clustering_accuracy
    from fedclust.result import Result, load

_HOMES = {
    "Algorithm": "fedclust.federation.algorithm",
    "Backend": "fedclust.federation.backend",
    "ClientContext": "fedclust.federation.context",
    "ClientModule": "fedclust.federation.client",
    "Dirichlet": "fedclust.data.partition",
    "FLAMECHE": "fedclust.algorithms.flameche",
    "FMCL": "fedclust.algorithms.fmcl",
    "Encoded": "fedclust.data.encoded",
    "FedAvg": "fedclust.algorithms.fedavg",
    "PrivateAdaptiveCFL": "fedclust.algorithms.pa_cfl",
    "FedDCN": "fedclust.algorithms.feddcn",
    "FederatedDataModule": "fedclust.data.datamodule",
    "FederatedLoop": "fedclust.federation.loop",
    "Iid": "fedclust.data.partition",
    "InProcess": "fedclust.federation.backend",
    "LabelGroups": "fedclust.data.partition",
    "LocalOnly": "fedclust.algorithms.local_only",
    "LabelSwaps": "fedclust.data.transforms",
    "Natural": "fedclust.data.partition",
    "Processes": "fedclust.federation.processes",
    "Result": "fedclust.result",
    "Rotations": "fedclust.data.transforms",
    "Server": "fedclust.federation.algorithm",
    "Shards": "fedclust.data.partition",
    "State": "fedclust.federation.algorithm",
    "Vectorised": "fedclust.federation.vectorised",
    "WeightedAverage": "fedclust.federation.averaging",
    "action": "fedclust.federation.client",
    "cluster": "fedclust.api",
    "clustering_accuracy": "fedclust.metrics",
    "federate": "fedclust.api",
    "load": "fedclust.result",
    "weighted_average": "fedclust.federation.averaging",
}

__version__ = "0.1.0"
__all__ = [
    "FLAMECHE",
    "FMCL",
    "Algorithm",
    "Backend",
    "ClientContext",
    "ClientModule",
    "Dirichlet",
    "Encoded",
    "FedAvg",
    "FedDCN",
    "FederatedDataModule",
    "FederatedLoop",
    "Iid",
    "InProcess",
    "LabelGroups",
    "LabelSwaps",
    "LocalOnly",
    "Natural",
    "PrivateAdaptiveCFL",
    "Processes",
    "Result",
    "Rotations",
    "Server",
    "Shards",
    "State",
    "Vectorised",
    "WeightedAverage",
    "action",
    "cluster",
    "clustering_accuracy",
    "federate",
    "load",
    "weighted_average",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedclust' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
