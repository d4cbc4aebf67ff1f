"""The same DCN under a plain Trainer: the upper line of every table; and the statistics that both ways share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fedclust.allocator import keep_freed_memory
from fedclust.clustering.geometry import umap_embedding
from fedclust.clustering.lloyd import nearest as nearest_rows
from fedclust.clustering.statistics import (
    add_statistics,
    cluster_means,
    metrics_from_statistics,
    silhouette_sum,
)
from fedclust.data.tables import Table
from fedclust.federation import checkpoint
from fedclust.federation.client import Batch, Terms
from fedclust.federation.context import check_precision
from fedclust.metrics import contingency_table
from fedclust.random import seed_for
from lightning_modules.dcn_base import CHUNK, DCNBase
from lightning_modules.dcn_plan import LocalPlan, LossWeights

_KEY = "fedclust_central"


class CentralDCN(DCNBase):
    """Training hooks of Algorithm 1 under a plain Trainer, and evaluation by sums."""

    def set_central_plan(
        self,
        recon_weight: float,
        cluster_weight: float,
        geometry_weight: float,
        pretrain_epochs: int,
        n_neighbors: int,
        min_dist: float,
    ) -> None:
        """Keeps the settings of central training; see `DCN`."""
        weights = LossWeights(recon_weight, cluster_weight, geometry_weight)
        self.plan = LocalPlan(weights, pretrain_epochs, 0, n_neighbors, min_dist)
        self._target: torch.Tensor | None = None
        self._tables: list[dict[str, torch.Tensor]] = []

    def loss_terms(self) -> tuple[str, ...]:
        """The unweighted terms that training logs; a term whose weight is 0 is not computed and therefore left out."""
        weights = vars(self.plan.weights)
        return tuple(f"train/{name}" for name in ("recon", "clust", "geom") if weights[name])

    # -- training -------------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Draws the initial weights from the seed and computes the geometric embedding where it is asked for."""
        check_precision(str(self.trainer.precision), "in central training", "rows are float32")
        keep_freed_memory()
        data = self._data_module()
        if self.trainer.ckpt_path is None:
            self.initialize(data.resolved_seed)
        if self.plan.weights.geom:
            embedding = umap_embedding(
                data.train.x.flatten(1).numpy(), self.latent_dim, n_neighbors=self.plan.n_neighbors,
                min_dist=self.plan.min_dist, seed=_seed(data, "umap"), who="train rows",
            )  # fmt: skip
            self._target = torch.from_numpy(embedding.target)
        if not self.plan.pretrain_epochs and not bool(self.centers.any()):
            self.cluster_rows(data.train.x, seed=_seed(data, "kmeans"))

    def on_save_checkpoint(self, saved: dict[str, Any]) -> None:
        """Adds the seed and what tells the data from other data, where the data module says it."""
        data = self._told_data()
        if data is not None:
            saved[_KEY] = {"seed": data.resolved_seed, **checkpoint.data_entries(data)}

    def on_load_checkpoint(self, saved: dict[str, Any]) -> None:
        """Compares with what `on_save_checkpoint` added, where a Trainer runs on such data.

        Raises:
            ValueError: If the checkpoint was written with another seed or other data.
        """
        data = self._told_data()
        if _KEY in saved and data is not None:
            checkpoint.compare(saved[_KEY], "seed", data.resolved_seed)
            checkpoint.compare_data(saved[_KEY], data)

    def training_step(self, batch: Batch, batch_idx: int) -> Terms:
        """The loss and its terms on one batch {"x", "index"}; λ is 0 during the pretraining epochs."""
        weights = self.plan.weights
        if self._pretraining():
            weights = LossWeights(weights.recon, 0.0, weights.geom)
        if self._target is not None and "index" in batch:
            batch = {**batch, "target": self._target[batch["index"].cpu()].to(batch["x"].device)}
        return self.terms(batch, weights)

    def on_train_epoch_start(self) -> None:
        """Starts the second phase with a new optimiser, as Algorithm 1 does, by forgetting the first one's moments."""
        if self.current_epoch == self.plan.pretrain_epochs > 0:
            for optimizer in self.trainer.optimizers:
                optimizer.state.clear()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the terms; after an epoch's last batch, and so before its validation, moves the centres."""
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.trainer.is_last_batch:
            self._move_centers()

    def _move_centers(self) -> None:
        """k-means++ at the end of pretraining, then warm starts."""
        data = self._data_module()
        last_pretraining = self.current_epoch + 1 == self.plan.pretrain_epochs
        if self.current_epoch + 1 < self.plan.pretrain_epochs and not self._last_epoch():
            return
        fresh = last_pretraining or not bool(self.centers.any())
        with torch.autocast(self.device.type, enabled=False):
            init = None if fresh else self.centers.clone()
            self.cluster_rows(data.train.x, init=init, seed=_seed(data, "kmeans"))
        self.train()

    def _pretraining(self) -> bool:
        return self._trainer is not None and self.current_epoch < self.plan.pretrain_epochs

    def _last_epoch(self) -> bool:
        return self.trainer.max_epochs is not None and self.current_epoch + 1 >= self.trainer.max_epochs

    def _told_data(self) -> Any | None:
        data: Any = None if self._trainer is None else getattr(self._trainer, "datamodule", None)
        return data if hasattr(data, "partition_record") else None

    def _data_module(self) -> Any:
        data = getattr(self.trainer, "datamodule", None)
        if data is None or not hasattr(data, "train"):
            raise TypeError("train a DCN with a fedclust.FederatedDataModule: it gives the pooled rows to k-means")
        return data

    # -- evaluation -----------------------------------------------------------------------------------------------

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Collects one batch of validation rows."""
        self._collect(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Collects one batch of test rows."""
        self._collect(batch)

    def on_validation_epoch_end(self) -> None:
        """Logs `val/…` from all batches at once."""
        self._log_collected("val")

    def on_test_epoch_end(self) -> None:
        """Logs `test/…` from all batches at once."""
        self._log_collected("test")

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        """Cluster of every row and its distance to the centre."""
        z = self.latents(batch["x"])
        labels, squared = nearest_rows(z, self.centers)
        return {"index": batch["index"], "cluster": labels, "distance": squared.sqrt()}

    def statistics(self, table: Table) -> dict[str, torch.Tensor]:
        """Sums over the rows of a table, from which `fedclust.metrics.metrics_from_statistics` computes all metrics.

        Returns:
            "n" (), "recon_sum" () sum over rows of the mean squared error, "counts" (K,), "sums" (K, d) latents summed
            per cluster, "square_sum" (d,); "contingency" (C, K) where the table has labels. float64 and int64.
        """
        K, d = self.n_clusters, self.latent_dim
        z = self.latents(table.x).cpu().double() if len(table) else torch.empty(0, d, dtype=torch.float64)
        labels, _ = nearest_rows(z, self.centers.cpu().double())
        error = sum(
            (self.decode_rows(part.float()).double() - rows.flatten(1).double()).square().mean(1).sum()
            for part, rows in zip(torch.split(z, CHUNK), torch.split(table.x, CHUNK), strict=True)
        )
        result = {
            "n": torch.tensor(len(table)),
            "recon_sum": torch.as_tensor(error, dtype=torch.float64),
            "counts": torch.bincount(labels, minlength=K),
            "sums": torch.zeros(K, d, dtype=torch.float64).index_add_(0, labels, z),
            "square_sum": z.square().sum(0),
        }
        if table.y is not None and self.n_classes is not None:
            result["contingency"] = torch.zeros(self.n_classes, K, dtype=torch.int64)
            if len(table):
                contingency = contingency_table(table.y.numpy(), labels.numpy(), self.n_classes, K)
                result["contingency"] += torch.from_numpy(contingency)
        return result

    def dispersion(self, table: Table, means: torch.Tensor, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Sums over the rows of a table that need the cluster means of all rows.

        Args:
            table: The rows.
            means: (K, d) cluster means over all clients.
            counts: (K,) rows of each cluster over all clients.

        Returns:
            "distance_sums" (K,), per cluster the sum of the latents' Euclidean distances to their mean;
            "silhouette_sum" (), the sum of the latents' simplified silhouettes; "silhouette_input_sum" (), that of the
            rows themselves around the decoded means, see `fedclust.clustering.statistics.silhouette_sum`. float64.
        """
        sums, none = torch.zeros(self.n_clusters, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        if not len(table):
            return {"distance_sums": sums, "silhouette_sum": none, "silhouette_input_sum": none}
        z, means = self.latents(table.x).cpu().double(), means.double()
        labels, _ = nearest_rows(z, self.centers.cpu().double())
        sums.index_add_(0, labels, (z - means[labels]).square().sum(1).sqrt())
        # The means of the rows themselves would have to be sent, and that of a cluster of one row is this row.
        decoded, chunks = self.decode_rows(means.float()).double(), torch.split(table.x.flatten(1), CHUNK)
        from_rows = (
            silhouette_sum(rows.cpu().double(), own, decoded, counts)
            for rows, own in zip(chunks, torch.split(labels, CHUNK), strict=True)
        )
        return {
            "distance_sums": sums,
            "silhouette_sum": silhouette_sum(z, labels, means, counts),
            "silhouette_input_sum": torch.stack([*from_rows]).sum(),
        }

    def _collect(self, batch: Mapping[str, torch.Tensor]) -> None:
        self._tables.append({name: value.cpu() for name, value in batch.items() if name in ("x", "y")})

    def _log_collected(self, split: str) -> None:
        if not self._tables:
            return
        x = torch.cat([part["x"] for part in self._tables])
        y = torch.cat([part["y"] for part in self._tables]) if "y" in self._tables[0] else None
        self._tables = []
        table = Table(x, y, torch.arange(len(x)).numpy())
        statistics = add_statistics([self.statistics(table)])
        dispersion = self.dispersion(table, cluster_means(statistics), statistics["counts"])
        metrics = metrics_from_statistics(statistics, dispersion)
        self.log_dict({f"{split}/{name}": value for name, value in metrics.items()}, prog_bar=True)


def _seed(data: Any, purpose: str) -> int:
    return seed_for(data.resolved_seed, "central", purpose) % 2**32
