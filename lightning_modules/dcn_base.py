"""The Deep Clustering Network itself: layers, losses and Algorithm 1 of the FedDCN paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import torch

from fedclust.checks import choice, positive, positive_int
from fedclust.clustering.geometry import umap_embedding
from fedclust.clustering.kmeans import KMeansResult, kmeans
from fedclust.federation.batches import gathered, shuffled_batches
from fedclust.federation.client import Batch, ClientModule, LocalFit, Terms
from fedclust.federation.context import WorkContext
from fedclust.federation.padding import mask_of, mean_over_rows, mean_squared_error
from fedclust.random import seeded
from lightning_modules.dcn_plan import LocalPlan, LossWeights
from lightning_modules.networks import Normalization, mlp_decoder, mlp_encoder

CHUNK = 8192


@dataclass(frozen=True)
class LocalResult:
    """What Algorithm 1 left: the last k-means, UMAP's effective n_neighbors (0: no geometry) and both fits."""

    clusters: KMeansResult
    n_neighbors: int
    fit: LocalFit


class DCNBase(ClientModule):
    """Autoencoder with cluster centres in its latent space.

    The encoder has, per hidden layer, Linear, BatchNorm1d and ReLU, then a plain Linear bottleneck; the decoder mirrors
    it (FedDCN paper, Sec. III-A1). Latent width and number of clusters are independent.

    Args:
        n_clusters: Number of clusters K.
        hidden_dims: Widths of the encoder's hidden layers.
        latent_dim: Width d of the latent space.
        output: "sigmoid" for data in [0, 1], "linear" for standardised data.
        normalization: "batch" as in the paper, "group" or "none".
        lr: Learning rate of Adam.
        batch_size: Rows per batch; a client with fewer rows uses one batch of all its rows.
        max_grad_norm: Largest norm of a step's gradient; None does not clip.
        input_dim: Number of features; None takes it from the data.
    """

    draws_in_training = False
    honours_row_masks = True

    def __init__(
        self,
        n_clusters: int,
        hidden_dims: Sequence[int],
        latent_dim: int,
        output: Literal["sigmoid", "linear"],
        normalization: Normalization,
        lr: float,
        batch_size: int,
        max_grad_norm: float | None,
        input_dim: int | None,
    ) -> None:
        super().__init__()
        choice("output", output, ("sigmoid", "linear"))
        choice("normalization", normalization, ("batch", "group", "none"))
        self.n_clusters, self.latent_dim = (
            positive_int("n_clusters", n_clusters),
            positive_int("latent_dim", latent_dim),
        )
        if not isinstance(hidden_dims, Sequence) or isinstance(hidden_dims, str):
            raise ValueError(f"hidden_dims must be a list of widths such as [128, 64], got {hidden_dims!r}")
        self.hidden_dims = [positive_int(f"hidden_dims[{i}]", width) for i, width in enumerate(hidden_dims)]
        if not self.hidden_dims:
            raise ValueError("hidden_dims must name at least one layer")
        self.lr, self.batch_size = positive("lr", lr), positive_int("batch_size", batch_size)
        self.max_grad_norm = None if max_grad_norm is None else positive("max_grad_norm", max_grad_norm)
        if batch_size == 1 and normalization == "batch":
            raise ValueError("batch_size must be at least 2 with normalization='batch': one row has no statistics")
        self.output, self.normalization = output, normalization
        self.input_dim: int | None = None
        self.n_classes: int | None = None
        self.register_buffer("centers", torch.zeros(self.n_clusters, self.latent_dim))
        self.centers: torch.Tensor
        if input_dim is not None:
            self.build((input_dim,), None)

    def build(self, input_shape: tuple[int, ...], n_classes: int | None) -> None:
        """Makes encoder and decoder for rows of this shape; rows are flattened.

        Raises:
            ValueError: If the module was built for another number of features.
        """
        features = prod(input_shape)
        self.n_classes = n_classes
        if self.input_dim == features:
            return
        if self.input_dim is not None:
            raise ValueError(f"this module was built for rows of {self.input_dim} features, the data has {features}")
        self.input_dim = features
        with seeded(features):  # layers draw when they are made: not from a generator that others are using
            self.encoder = mlp_encoder(features, self.hidden_dims, self.latent_dim, self.normalization)
            self.decoder = mlp_decoder(features, self.hidden_dims, self.latent_dim, self.normalization, self.output)
        self.hparams["input_dim"] = features

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, fused where PyTorch has it for the device."""
        device = next(self.parameters()).device.type
        return torch.optim.Adam(self.parameters(), lr=self.lr, fused=device in ("cpu", "cuda"))

    # -- the network ----------------------------------------------------------------------------------------------

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Rows (n, …) → latents (n, latent_dim), float32."""
        return self.encoder(x.flatten(1)).float()

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Latents (n, latent_dim) → rows (n, features), float32."""
        return self.decoder(z).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Cluster of every row: (n, …) → (n,) int64."""
        return nearest(self.encode(x), self.centers)

    def terms(self, batch: Batch, weights: LossWeights) -> Terms:
        """The loss and its unweighted terms on one batch (FedDCN paper, Eq. 2-5).

        `recon` is a mean over rows and features, `clust` a mean over rows of the squared distance to the nearest
        centre, `geom` a mean over rows and latent dimensions. All are float32, without square roots.

        Args:
            batch: "x" (n, …); optionally "target" (m, latent_dim), the geometric embedding of "geometry_x" or, where
                that is missing, of "x".
            weights: Weights of the terms.
        """
        x, rows = batch["x"].flatten(1), mask_of(batch, "x")
        terms: Terms = {}
        if weights.recon or weights.clust or "geometry_x" not in batch:
            z = self.encode(x)
        if weights.recon:
            terms["recon"] = mean_squared_error(self.decode(z), x.float(), rows)
        if weights.clust:
            assigned = self.centers[nearest(z.detach(), self.centers)]
            terms["clust"] = mean_over_rows((z - assigned).square().sum(1), rows)
        if weights.geom and "target" in batch:
            embedded = self.encode(batch["geometry_x"]) if "geometry_x" in batch else z
            terms["geom"] = mean_squared_error(embedded, batch["target"].float(), mask_of(batch, "target"))
        total = torch.stack([getattr(weights, name) * value for name, value in terms.items()]).sum()
        return {"loss": total, **terms}

    @torch.no_grad()
    def latents(self, x: torch.Tensor) -> torch.Tensor:
        """Latents of many rows in evaluation mode, float32 on the module's device, chunk by chunk."""
        self.eval()
        device = self.centers.device
        with torch.autocast(device.type, enabled=False):
            return torch.cat([self.encode(chunk.to(device)) for chunk in torch.split(x, CHUNK)])

    @torch.no_grad()
    def decode_rows(self, z: torch.Tensor) -> torch.Tensor:
        """Decodes latents in evaluation mode, on the CPU; clamped to [0, 1] with the Sigmoid output only."""
        self.eval()
        with torch.autocast(self.centers.device.type, enabled=False):
            rows = self.decode(z.to(self.centers.device)).cpu()
        return rows.clamp(0, 1) if self.output == "sigmoid" else rows

    # -- Algorithm 1 ----------------------------------------------------------------------------------------------

    def local_dcn(
        self, ctx: WorkContext, x: torch.Tensor, plan: LocalPlan, target: torch.Tensor | None = None
    ) -> LocalResult:
        """Pretrains, then alternates between an epoch of training and k-means (FedDCN paper, Alg. 1).

        Args:
            ctx: Generators, device and precision.
            x: Rows (n, …).
            plan: Epochs, loss weights and UMAP's parameters.
            target: Geometric embedding (n, latent_dim) of the rows; None computes UMAP here if its weight is not 0.
        """
        n_neighbors = 0
        if target is None and plan.weights.geom:
            embedding = umap_embedding(
                x.flatten(1).cpu().numpy(), self.latent_dim, n_neighbors=plan.n_neighbors, min_dist=plan.min_dist,
                seed=ctx.seed_for("umap"), who=ctx.who,
            )  # fmt: skip
            target, n_neighbors = torch.from_numpy(embedding.target), embedding.n_neighbors
        x = x.flatten(1).to(ctx.device)
        target = None if target is None or not plan.weights.geom else target.to(ctx.device)
        rng = ctx.rng("batches")

        def batches(epoch: int) -> Iterator[Batch]:
            for rows in shuffled_batches(len(x), self.batch_size, rng):
                batch = {"x": gathered((x, rows))}
                yield batch if target is None else batch | {"target": gathered((target, rows))}

        return self._alternate(ctx, x, plan, batches, n_neighbors)

    def _alternate(
        self,
        ctx: WorkContext,
        x: torch.Tensor,
        plan: LocalPlan,
        batches: Callable[[int], Iterable[Batch]],
        n_neighbors: int,
    ) -> LocalResult:
        weights = plan.weights
        without = LossWeights(weights.recon, 0.0, weights.geom)
        fit = self.fit_locally(ctx, plan.pretrain_epochs, batches=batches, loss=partial(self.terms, weights=without))
        clusters = self.cluster_rows(x, seed=ctx.seed_for("kmeans"), who=ctx.who)

        def update_centers(epoch: int) -> None:
            nonlocal clusters
            clusters = self.cluster_rows(x, init=clusters.centers, who=ctx.who)

        if plan.cluster_epochs:
            fit = self.fit_locally(
                ctx, plan.cluster_epochs, batches=batches, loss=partial(self.terms, weights=weights),
                after_epoch=update_centers,
            )  # fmt: skip
        return LocalResult(clusters, n_neighbors, fit)

    def cluster_rows(
        self, x: torch.Tensor, *, init: torch.Tensor | None = None, seed: int = 0, who: str = ""
    ) -> KMeansResult:
        """k-means on the latents of rows, which moves the module's centres; `init` starts it from known centres."""
        z = self.latents(x)
        result = kmeans(z, self.n_clusters, init=None if init is None else init.to(z.device), seed=seed, who=who)
        self.centers.copy_(result.centers)
        return result


def nearest(z: torch.Tensor, centers: torch.Tensor) -> torch.Tensor:
    """Index of the nearest centre, ties to the lower index; (n, d), (K, d) → (n,) int64."""
    return (z.unsqueeze(1) - centers.unsqueeze(0)).square().sum(2).argmin(1)
