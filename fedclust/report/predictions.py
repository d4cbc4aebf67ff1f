"""predictions.csv: one row per sample with its cluster and the distance to the cluster's centre."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from fedclust.data.loading import pooled_loader
from fedclust.data.tables import SPLITS
from fedclust.report.files import write_csv

COLUMNS = ("row", "client", "cluster", "distance", "split")


def weights_only(method: Any) -> dict[str, Any]:
    """The argument that makes a Trainer method refuse pickled objects, where its version of Lightning has it."""
    return {"weights_only": True} if "weights_only" in inspect.signature(method).parameters else {}


def predict_rows(
    trainer: pl.Trainer, model: pl.LightningModule, data: Any, ckpt_path: str | None
) -> Iterator[dict[str, Any]]:
    """Predicts every row of every client and yields {"row", "client", "cluster", "distance", "split"}.

    Row numbers count in the source's tables, as in partition.json.

    Args:
        trainer: The Trainer.
        model: A federated loop, or a client module trained centrally.
        data: A `FederatedDataModule`.
        ckpt_path: Checkpoint to predict with; None takes the model as it is.
    """
    if hasattr(model, "prediction_loader"):
        outputs = trainer.predict(model, datamodule=data, ckpt_path=ckpt_path, **weights_only(trainer.predict))
        yield from federated_rows(outputs or [])
        return
    for split in SPLITS:
        outputs = trainer.predict(
            model, datamodule=_OneSplit(data, split), ckpt_path=ckpt_path, **weights_only(trainer.predict)
        )
        yield from central_rows(outputs or [], data, split)


def federated_rows(outputs: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Rows from the outputs of `FederatedLoop.predict_step`: {"client", "split", "rows", "cluster", "distance"}."""
    for part in outputs:
        values = zip(_list(part["rows"]), _list(part["cluster"]), _list(part["distance"]), strict=True)
        for row, cluster, distance in values:
            yield _row(row, int(part["client"]), cluster, distance, str(part["split"]))


def central_rows(outputs: Iterable[Any], data: Any, split: str) -> Iterator[dict[str, Any]]:
    """Rows from the outputs of a client module under a plain Trainer: {"index", "cluster", "distance"}.

    Args:
        outputs: Outputs of `predict_step`; index is the position in the pooled table.
        data: A `FederatedDataModule`, which knows each position's source row and client.
        split: "train", "val" or "test".
    """
    table = getattr(data, split)
    sizes = torch.tensor([len(getattr(data.client(client), split)) for client in range(data.n_clients)])
    clients = torch.repeat_interleave(torch.arange(data.n_clients), sizes).tolist()
    for part in outputs:
        for index, cluster, distance in zip(
            _list(part["index"]), _list(part["cluster"]), _list(part["distance"]), strict=True
        ):
            yield _row(int(table.rows[index]), clients[index], cluster, distance, split)


def write_predictions(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Writes predictions.csv; returns the number of rows."""
    kept = list(rows)
    write_csv(path, kept, COLUMNS)
    return len(kept)


def _row(row: int, client: int, cluster: int, distance: float, split: str) -> dict[str, Any]:
    return {"row": row, "client": client, "cluster": cluster, "distance": distance, "split": split}


def _list(values: Any) -> list[Any]:
    return list(values.tolist())


class _OneSplit(pl.LightningDataModule):
    """A data module whose prediction loader gives one split's pooled rows; all else is the wrapped module's."""

    def __init__(self, data: Any, split: str) -> None:
        super().__init__()
        self._data, self._split = data, split

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def setup(self, stage: str) -> None:
        self._data.setup(stage)

    def predict_dataloader(self) -> Any:
        table = getattr(self._data, self._split)
        return pooled_loader(table, self._data.batch_size) if len(table) else []
