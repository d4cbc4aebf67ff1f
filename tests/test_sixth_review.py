"""What a new user ran into: class names of other data modules, parts given as classes, floods of notes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedclust
from fedclust.data.inputs import Inputs
from fedclust.data.tables import ClientData, Table
from fedclust.report.summary import empty_summary
from fedclust.report.table import results_table
from lightning_modules import Classifier, FLAMECHEClient, FMCLClient
from lightning_modules.encoders import RandomKaimingEncoder

CLASSES = ["cat", "cow", "dog", "hen"]


def module(names: list[str]) -> fedclust.FederatedDataModule:
    """Four rows of every named class, on one client, numbered by their order here."""
    labels = np.repeat(names, 4)
    rows = np.random.default_rng(0).random((len(labels), 3), np.float32)
    data = fedclust.FederatedDataModule(source=[(rows, labels)], scale="none", test_fraction=0.0, val_fraction=0.0)
    data.setup()
    return data


def inputs() -> Inputs:
    return Inputs((3,), 4, None, None, CLASSES)


def test_a_table_of_another_data_module_is_matched_by_class_names() -> None:
    table = module(["hen"]).client(0).train
    assert table.class_names == ("hen",)
    assert table.y is not None
    assert int(table.y.max()) == 0
    found = inputs().client(table).train
    assert found.y is not None
    assert found.y.tolist() == [3] * 4
    assert found.class_names == tuple(CLASSES)


def test_a_whole_client_of_another_data_module_is_matched_too() -> None:
    client = module(["dog", "cat"]).client(0)
    found = inputs().client(client)
    names = client.train.class_names
    assert names is not None
    assert client.train.y is not None
    assert found.train.y is not None
    expected = [CLASSES.index(names[index]) for index in client.train.y.tolist()]
    assert found.train.y.tolist() == expected
    assert set(expected) == {0, 2}
    assert len(found.val) == len(found.test) == 0


def test_a_class_that_the_model_never_saw_is_refused() -> None:
    with pytest.raises(ValueError, match="labels must be among cat, cow, dog, hen, got owl"):
        inputs().client(module(["owl"]).client(0).train)


def test_equal_names_and_tables_without_names_stay_as_they_are() -> None:
    table = module(CLASSES).client(0).train
    assert inputs().client(table).train is table
    bare = Table(torch.rand(2, 3), torch.tensor([1, 2]), np.arange(2))
    assert inputs().client(ClientData(bare, bare.select([]), bare.select([]))).train is bare


@pytest.mark.parametrize(
    ("backend", "named"),
    [("fedclust.Processes", "'fedclust.Processes'"), (fedclust.Vectorised, "the class Vectorised")],
)
def test_a_backend_that_is_none_is_refused(backend: Any, named: str) -> None:
    data = fedclust.FederatedDataModule("digits", fedclust.Iid(3), seed=0)
    with pytest.raises(TypeError, match=rf"backend must be an instance of Backend .*, not {named}"):
        fedclust.federate(fedclust.FedAvg(), Classifier("mlp"), data, rounds=1, backend=backend)


def test_an_encoders_class_is_no_encoder() -> None:
    wrong: Any = RandomKaimingEncoder
    for make in (lambda: fedclust.Encoded("digits", wrong), lambda: FMCLClient(encoder=wrong)):
        with pytest.raises(ValueError, match=r"not the class RandomKaimingEncoder: write RandomKaimingEncoder\(\)"):
            make()


def test_many_notes_do_not_bury_the_table() -> None:
    summary = empty_summary("fit", None)
    summary.update(method="FLAMECHE", metrics={"test/acc_mean": 0.5}, notes=[f"round {n}: kept" for n in range(30)])
    lines = results_table(summary).splitlines()
    assert sum(line.startswith("  note: ") for line in lines) == 12
    assert lines[-1].startswith("  and 18 more notes")


@pytest.mark.parametrize("n_init", [None, 2])
def test_several_starts_of_protected_sums_are_noted(n_init: int | None) -> None:
    data = fedclust.FederatedDataModule("digits", fedclust.Iid(4), transform=fedclust.Rotations([0, 180]), seed=0)
    result = fedclust.federate(
        fedclust.FLAMECHE(2, n_init=n_init, round_epochs=0, aggregation="secure_sum"),
        FLAMECHEClient("small_cnn"), data, rounds=1, progress=False,
    )  # fmt: skip
    assert any(note.startswith("n_init is 2: with protected sums") for note in result.notes) == (n_init == 2)
