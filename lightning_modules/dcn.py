"""FedDCN's client: everything that a client reveals is in the replies of the actions below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from fedclust.clustering.lloyd import nearest as nearest_rows
from fedclust.clustering.synthetic import cluster_spread, count_points
from fedclust.federation.batches import Cycle, gathered, shuffled_batches
from fedclust.federation.client import Batch, action
from fedclust.federation.context import ClientContext, WorkContext
from fedclust.federation.message import Message, Value, read_int, tensors_under, with_prefix
from lightning_modules.dcn_central import CentralDCN
from lightning_modules.dcn_plan import plan_of, weights_of
from lightning_modules.networks import Normalization


class DCN(CentralDCN):
    """Deep Clustering Network: FedDCN's client, and under a plain Trainer a central DCN.

    The loss weights below serve central training only; in a federation they come from the algorithm.

    Args:
        n_clusters: Number of clusters K.
        hidden_dims: Widths of the encoder's hidden layers; the decoder mirrors them.
        latent_dim: Width d of the latent space, independent of K.
        output: "sigmoid" for data in [0, 1], "linear" for standardised data.
        normalization: "batch" as in the paper, "group" or "none".
        lr: Learning rate of Adam.
        batch_size: Rows per batch; a client with fewer rows uses one batch of all its rows.
        max_grad_norm: Largest norm of a step's gradient; None does not clip.
        input_dim: Number of features; None takes it from the data.
        recon_weight: α, central training.
        cluster_weight: λ, central training.
        geometry_weight: β, central training; 0 leaves UMAP out.
        pretrain_epochs: Central training: the first epochs, trained with λ = 0.
        n_neighbors: Central training: UMAP's n_neighbors.
        min_dist: Central training: UMAP's min_dist.
    """

    def __init__(
        self,
        n_clusters: int = 10,
        hidden_dims: Sequence[int] = (512, 256, 128),
        latent_dim: int = 10,
        output: Literal["sigmoid", "linear"] = "sigmoid",
        normalization: Normalization = "batch",
        lr: float = 1e-3,
        batch_size: int = 256,
        max_grad_norm: float | None = 1.0,
        input_dim: int | None = None,
        recon_weight: float = 1.0,
        cluster_weight: float = 0.01,
        geometry_weight: float = 0.0,
        pretrain_epochs: int = 50,
        n_neighbors: int = 15,
        min_dist: float = 0.1,
    ) -> None:
        super().__init__(
            n_clusters, hidden_dims, latent_dim, output, normalization, lr, batch_size, max_grad_norm, input_dim
        )
        self.save_hyperparameters()
        converted = ("n_clusters", "hidden_dims", "latent_dim", "lr", "batch_size", "max_grad_norm")
        self.hparams.update({name: getattr(self, name) for name in converted})
        self.set_central_plan(
            recon_weight, cluster_weight, geometry_weight, pretrain_epochs, n_neighbors, min_dist
        )  # fmt: skip

    # -- stage 1 --------------------------------------------------------------------------------------------------

    @action
    def learn_locally(self, message: Message, ctx: ClientContext) -> Message:
        """Stage 1: Algorithm 1 on the client's own rows; replies with centres, spread, counts and the decoder."""
        self._receive(message)
        x = ctx.data.train.x
        result = self.local_dcn(ctx, x, plan_of(message))
        z, labels = self.latents(x).cpu(), result.clusters.labels.cpu()
        centers = result.clusters.centers.cpu()
        rule: Any = message["counts"]
        kind: Any = message["sampling"]
        isotropic = cluster_spread(z, labels, centers, kind="isotropic")
        counts = count_points(z, labels, centers, isotropic, rule=rule)
        fell_back = int(counts.sum()) == 0
        if fell_back:
            counts = count_points(z, labels, centers, isotropic, rule="assigned")
        spread = isotropic if kind == "isotropic" else cluster_spread(z, labels, centers, kind=kind)
        ctx.state["assignments"] = labels.to(torch.int16)
        return {
            "n_rows": len(x),
            "n_steps": result.fit.n_steps,
            "centers": centers,
            "spread": spread,
            "counts": counts,
            "counts_fell_back": fell_back,
            "outside_output": self.output == "sigmoid" and bool(x.min() < 0 or x.max() > 1),
            "n_populated": result.clusters.n_populated,
            "n_neighbors": result.n_neighbors,
            **with_prefix("decoder", self.decoder_tensors()),
        }

    def learn_from(
        self, message: Mapping[str, Value], ctx: WorkContext, x: torch.Tensor, target: torch.Tensor | None
    ) -> torch.Tensor:
        """Stage 2: Algorithm 1 on the server's synthetic rows and their embedding; returns the centres (K, d)."""
        centers = self.local_dcn(ctx, x, plan_of(message), target).clusters.centers.cpu()
        assert isinstance(centers, torch.Tensor)
        return centers

    # -- stage 3 --------------------------------------------------------------------------------------------------

    @action
    def update(self, message: Message, ctx: ClientContext) -> Message:
        """Stage 3 (a), LocalAeUpdate of Alg. 2: local epochs on real rows joined by synthetic ones."""
        self._receive(message)
        x = ctx.data.train.x.flatten(1).to(ctx.device)
        weights = weights_of(message)
        none = torch.empty(0, x.shape[1])
        synthetic, geometry = (
            torch.as_tensor(message.get(name, none)).to(ctx.device) for name in ("synthetic", "geometry")
        )
        rng = ctx.rng("batches")
        augment = Cycle(len(synthetic), ctx.rng("augmentation")) if message["augment"] else None
        embed = Cycle(len(synthetic), ctx.rng("geometry")) if weights.geom else None

        def batches(epoch: int) -> Iterator[Batch]:
            for rows in shuffled_batches(len(x), self.batch_size, rng):
                joined = [] if augment is None else [(synthetic, augment.take(len(rows)))]
                batch = {"x": gathered((x, rows), *joined)}
                if embed is not None:
                    drawn = embed.take(len(rows))
                    batch |= {"geometry_x": gathered((synthetic, drawn)), "target": gathered((geometry, drawn))}
                yield batch

        epochs = read_int(message, "epochs")
        fit = self.fit_locally(ctx, epochs, batches=batches, loss=partial(self.terms, weights=weights))
        return {
            "n_rows": len(x),
            "n_steps": fit.n_steps,
            **with_prefix("term", dict(fit.terms)),
            **with_prefix("weights", self.snapshot()),
        }

    @action
    def cluster(self, message: Message, ctx: ClientContext) -> Message:
        """Stage 3 (b), LocalClustering of Alg. 2: k-means on real and synthetic latents, from the global centres."""
        self._receive(message)
        real = ctx.data.train.x.flatten(1)
        rows = torch.cat([real, torch.as_tensor(message["synthetic"]).to(real)]) if message["augment"] else real
        result = self.cluster_rows(rows, init=self.centers.clone(), who=ctx.who)
        ctx.state["assignments"] = result.labels[: len(real)].cpu().to(torch.int16)
        return {"centers": result.centers.cpu(), "populated": result.populated.cpu()}

    # -- evaluation -----------------------------------------------------------------------------------------------

    @action
    def evaluate(self, message: Message, ctx: ClientContext) -> Message:
        """Sums over one split's rows from which the server computes every metric; no row leaves the client."""
        self._receive(message)
        return {**self.statistics(ctx.table(message))}

    @action
    def disperse(self, message: Message, ctx: ClientContext) -> Message:
        """Sums of the distances to the cluster means of all clients, per cluster, and of the silhouettes."""
        self._receive(message)
        means, counts = torch.as_tensor(message["means"]), torch.as_tensor(message["counts"])
        return {**self.dispersion(ctx.table(message), means, counts)}

    @action
    def assign(self, message: Message, ctx: ClientContext) -> Message:
        """Cluster of every row of one split, and its distance to the centre."""
        self._receive(message)
        table = ctx.table(message)
        labels, distances = self.assignments(table.x)
        return {"rows": table.rows, "cluster": labels, "distance": distances}

    def assignments(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cluster (n,) int64 and Euclidean distance to its centre (n,) float32 of every row, on the CPU."""
        if not len(x):
            return torch.empty(0, dtype=torch.int64), torch.empty(0)
        z, centers = self.latents(x).cpu(), self.centers.cpu()
        labels, squared = nearest_rows(z, centers)
        return labels, squared.sqrt()

    # -- helpers --------------------------------------------------------------------------------------------------

    def decoder_tensors(self) -> dict[str, torch.Tensor]:
        """A copy of the decoder's exchanged tensors, names without "decoder."."""
        start = "decoder."
        return {name[len(start) :]: value for name, value in self.snapshot().items() if name.startswith(start)}

    def load_decoder(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes a client's decoder, leaving the encoder as it is."""
        self.load_exchanged({**self.exchanged(), **{f"decoder.{name}": value for name, value in tensors.items()}})

    def _receive(self, message: Message) -> None:
        self.load_exchanged(tensors_under("weights", message))
        if "centers" in message:
            with torch.no_grad():
                self.centers.copy_(torch.as_tensor(message["centers"]))
