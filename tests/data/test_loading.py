"""FederatedDataModule under a plain Trainer, and its form in YAML and on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from jsonargparse import ArgumentParser
from torch.utils.data import DataLoader

from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import Iid

RNG = np.random.default_rng(0)
X, Y = RNG.random((100, 6)).astype(np.float32), np.arange(100) % 4


class Counter(pl.LightningModule):
    """Collects the batches that a Trainer hands to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: dict[str, list[dict[str, torch.Tensor]]] = {"fit": [], "validate": [], "test": [], "predict": []}

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        self.seen["fit"].append(batch)
        return self.weight * batch["x"].sum()

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.seen["validate"].append(batch)

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.seen["test"].append(batch)

    def predict_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        self.seen["predict"].append(batch)
        return batch["index"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(epochs: int = 1) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_plain_trainer_sees_every_row_once() -> None:
    """A8: the last, smaller batch is kept; a single left-over row joins the batch before it."""
    data, module = FederatedDataModule((X, Y), Iid(4), batch_size=23), Counter()
    assert sum(data.n_rows) % 23 > 1
    trainer().fit(module, datamodule=data)
    trainer().test(module, datamodule=data, verbose=False)
    trainer().predict(module, datamodule=data)
    for stage, table in (("fit", data.train), ("validate", data.val), ("test", data.test), ("predict", data.test)):
        index = torch.cat([batch["index"] for batch in module.seen[stage]])
        assert sorted(index.tolist()) == list(range(len(table)))
        for batch in module.seen[stage]:
            assert torch.equal(batch["x"], table.x[batch["index"]])
            assert table.y is not None
            assert torch.equal(batch["y"], table.y[batch["index"]])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_plain_trainer_without_validation_and_test_rows() -> None:
    data, module = FederatedDataModule((X, Y), Iid(4), val_fraction=0, test_fraction=0), Counter()
    trainer().fit(module, datamodule=data)
    trainer().test(module, datamodule=data, verbose=False)
    assert {stage: len(batches) for stage, batches in module.seen.items()} == {
        "fit": 1,
        "validate": 0,
        "test": 0,
        "predict": 0,
    }


@pytest.mark.parametrize(("batch_size", "sizes"), [(8, [8, 8, 8, 8]), (31, [32]), (300, [32]), (1, [1] * 32)])
def test_batch_sizes(batch_size: int, sizes: list[int]) -> None:
    """A8, and B3: 32 rows in batches of 31 leave no batch of one row."""
    data = FederatedDataModule((X[:32], Y[:32]), Iid(2), val_fraction=0, test_fraction=0, batch_size=batch_size)
    loader = data.train_dataloader()
    assert [len(batch["x"]) for batch in loader] == sizes
    assert len(loader) == len(sizes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_shuffling_is_seeded_and_new_in_every_epoch() -> None:
    orders = []
    for seed in (0, 0, 1):
        data, module = FederatedDataModule((X, Y), Iid(1), seed=seed), Counter()
        trainer(epochs=2).fit(module, datamodule=data)
        orders.append([batch["index"].tolist() for batch in module.seen["fit"]])
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] != orders[0][1]


class OwnLoaders(Counter):
    """Brings its own loaders, as the federated loop does."""

    def round_loader(self) -> DataLoader[Any]:
        return DataLoader([{"x": 7.0}])  # type: ignore[arg-type]

    def evaluation_loader(self) -> DataLoader[Any]:
        return DataLoader([{"x": 8.0, "index": 0}])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_module_may_bring_its_own_loaders() -> None:
    data, module = FederatedDataModule((X, Y), Iid(4)), OwnLoaders()
    trainer().fit(module, datamodule=data)
    trainer().test(module, datamodule=data, verbose=False)
    trainer().predict(module, datamodule=data)
    seen = {stage: [float(batch["x"]) for batch in batches] for stage, batches in module.seen.items()}
    assert seen == {"fit": [7.0], "validate": [8.0], "test": [8.0], "predict": [8.0]}


def parse(tmp_path: Path, text: str, *flags: str) -> FederatedDataModule:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(FederatedDataModule, "data")
    (tmp_path / "data.yaml").write_text(text)
    config = parser.parse_args(["--config", str(tmp_path / "data.yaml"), *flags])
    data = parser.instantiate(config).data
    assert isinstance(data, FederatedDataModule)
    return data


YAML = """
data:
  class_path: fedclust.data.datamodule.FederatedDataModule
  init_args:
    source: digits
    val_fraction: 1e-1
    partition:
      class_path: fedclust.data.partition.Dirichlet
      init_args: {n_clients: 4, alpha: 1e3}
    transform:
      class_path: fedclust.data.transforms.LabelSwaps
      init_args: {pairs: [[], [[0, 1], [2, 3]]]}
"""


def test_yaml(tmp_path: Path) -> None:
    """H8 for the data: numbers such as 1e-1 are floats."""
    data = parse(tmp_path, YAML)
    assert data.val_fraction == 0.1
    assert data.partition.describe()["args"]["alpha"] == 1000.0
    assert data.n_clients == 4
    assert data.groups is not None
    assert data.groups.tolist() == [0, 1, 0, 1]


def test_command_line_overrides(tmp_path: Path) -> None:
    flags = ("--data.partition.alpha", "1e-1", "--data.transform=null", "--data.source=digits", "--data.seed=4")
    data = parse(tmp_path, YAML, *flags)
    assert data.partition.describe()["args"]["alpha"] == 0.1
    assert data.resolved_seed == 4
    assert data.groups is None


def test_unknown_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="n_client"):
        parse(tmp_path, YAML.replace("n_clients", "n_client"))
