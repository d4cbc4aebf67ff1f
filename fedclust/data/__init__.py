"""The data room: sources, partitions, transforms per client, and the data module that puts them together."""

from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import Dirichlet, Iid, LabelGroups, Natural, Partition, Shards
from fedclust.data.shares import label_entropies, matching_test_parts, mean_label_entropy
from fedclust.data.sources import load_source
from fedclust.data.tables import ClientData, Source, Table
from fedclust.data.transforms import ClientTransform, LabelSwaps, Rotations

__all__ = [
    "ClientData",
    "ClientTransform",
    "Dirichlet",
    "FederatedDataModule",
    "Iid",
    "LabelGroups",
    "LabelSwaps",
    "Natural",
    "Partition",
    "Rotations",
    "Shards",
    "Source",
    "Table",
    "label_entropies",
    "load_source",
    "matching_test_parts",
    "mean_label_entropy",
]
