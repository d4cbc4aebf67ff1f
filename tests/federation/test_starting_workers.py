"""What it takes to start workers is told apart from the work."""

from __future__ import annotations

import fedclust
from lightning_modules import Classifier


def test_starting_workers_is_no_part_of_a_stage() -> None:
    data = fedclust.FederatedDataModule("digits", fedclust.Iid(2), seed=0)
    result = fedclust.federate(
        fedclust.FedAvg(), Classifier("linear"), data, rounds=1, backend=fedclust.Processes(1), progress=False
    )
    seconds = result.summary["seconds"]
    assert seconds["workers"] > seconds["train"]
