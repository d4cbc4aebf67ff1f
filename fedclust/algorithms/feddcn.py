"""FedDCN: Federated Deep Clustering Networks (Stallmann et al., arXiv:2609.21829), server side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor

from fedclust.algorithms.clustering import ClusteringAlgorithm, DeepClusteringModule, deep_clustering
from fedclust.apportion import allocate_rows
from fedclust.checks import choice, non_negative, positive_int, unit
from fedclust.clustering.geometry import check_umap_size, umap_embedding
from fedclust.clustering.kmeans import kmeans
from fedclust.clustering.synthetic import sample_latents
from fedclust.federation.algorithm import Metrics, Server, State
from fedclust.federation.averaging import TermMeans, WeightedAverage
from fedclust.federation.client import ClientModule
from fedclust.federation.message import Message, read_number, read_tensor, tensors_under, with_prefix

Sampling = Literal["isotropic", "diagonal"]
Counts = Literal["within_sigma", "assigned"]
Covariance = Literal["sigma_squared", "sigma"]


@dataclass
class FedDCNState(State):
    """What the server knows between rounds.

    Attributes:
        weights: The global autoencoder's exchanged tensors.
        centers: Global centres (K, d).
        synthetic: Rows decoded from all clients (S, features).
        geometry: Their UMAP embedding (S, d), row by row; (0, d) if no stage uses it.
    """

    weights: dict[str, Tensor]
    centers: Tensor
    synthetic: Tensor
    geometry: Tensor


class FedDCN(ClusteringAlgorithm):
    """Deep clustering across clients in three stages: local DCNs, server initialisation, federated rounds.

    Stage 1 (Alg. 1, Sec. III-A): every client trains a DCN of its own and sends centres, spreads, counts and its
    decoder, from which the server decodes synthetic rows. Stage 2 (Sec. III-B): the server embeds these with UMAP and
    initialises the global model on them. Stage 3 (Alg. 2): rounds of local training on real and synthetic rows,
    weighted averaging, local k-means and k-means over the local centres.

    Args:
        recon_weight: α of the reconstruction term, all stages.
        cluster_weight: λ of the clustering term, all stages but the pretraining epochs.
        geometry_pretrain: β_pre of the geometric term in stages 1 and 2; 0 leaves it out.
        geometry_federated: β_fed of the geometric term in stage 3; 0 leaves it out.
        pretrain_epochs: Epochs without clustering term, in stages 1 and 2.
        cluster_epochs: Epochs with it, each followed by k-means, in stages 1 and 2.
        round_epochs: Local epochs per round of stage 3.
        n_synthetic: Rows of the synthetic set, exactly.
        sampling: "isotropic" (the paper's: one standard deviation per cluster) or "diagonal" (one per coordinate).
        counts: Rows per centre by its points "within_sigma" (the paper's) or all "assigned" ones (its rule for USPS).
        covariance: "sigma_squared" draws with covariance σ²I (the authors' code), "sigma" with σI as printed.
        augment: Whether stage 3 joins every real batch by an equally large synthetic one.
        n_neighbors: UMAP's n_neighbors, at most the number of rows less one.
        min_dist: UMAP's min_dist.

    Raises:
        ValueError: Naming the argument, its value and what is allowed.
    """

    state_class: ClassVar[type[State]] = FedDCNState
    default_monitor: ClassVar[tuple[str, str]] = ("val/dbi", "min")

    def __init__(
        self,
        recon_weight: float = 1.0,
        cluster_weight: float = 0.01,
        geometry_pretrain: float = 0.01,
        geometry_federated: float = 0.001,
        pretrain_epochs: int = 50,
        cluster_epochs: int = 25,
        round_epochs: int = 5,
        n_synthetic: int = 5000,
        sampling: Sampling = "isotropic",
        counts: Counts = "within_sigma",
        covariance: Covariance = "sigma_squared",
        augment: bool = True,
        n_neighbors: int = 15,
        min_dist: float = 0.1,
    ) -> None:
        self.recon_weight = non_negative("recon_weight", recon_weight)
        self.cluster_weight = non_negative("cluster_weight", cluster_weight)
        self.geometry_pretrain = non_negative("geometry_pretrain", geometry_pretrain)
        self.geometry_federated = non_negative("geometry_federated", geometry_federated)
        self.pretrain_epochs = positive_int("pretrain_epochs", pretrain_epochs, least=0)
        self.cluster_epochs = positive_int("cluster_epochs", cluster_epochs, least=0)
        self.round_epochs = positive_int("round_epochs", round_epochs)
        self.n_synthetic = positive_int("n_synthetic", n_synthetic)
        self.sampling = cast(Sampling, choice("sampling", sampling, get_args(Sampling)))
        self.counts = cast(Counts, choice("counts", counts, get_args(Counts)))
        self.covariance = cast(Covariance, choice("covariance", covariance, get_args(Covariance)))
        self.augment = augment
        self.n_neighbors = positive_int("n_neighbors", n_neighbors, least=2)
        self.min_dist = unit("min_dist", min_dist)
        if self.recon_weight == 0 and not (self.geometry_pretrain and self.geometry_federated):
            raise ValueError("recon_weight 0 needs positive geometry weights: pretraining has λ = 0, nothing to learn")

    def metric_names(self, labels: bool) -> frozenset[str]:
        """Validation metrics and training terms."""
        return super().metric_names(labels) | {"train/loss", *self.loss_terms()}

    def loss_terms(self) -> tuple[str, ...]:
        """The unweighted terms of stage 3; one whose weight is 0 is not computed, so it is left out."""
        weights = (self.recon_weight, self.cluster_weight, self.geometry_federated)
        return tuple(f"train/{name}" for name, used in zip(("recon", "clust", "geom"), weights) if used)

    # -- before the first round -----------------------------------------------------------------------------------

    def check(self, server: Server) -> None:
        """Refuses clients and synthetic sets that are too small, before any training."""
        module = deep_clustering(server.module)
        for client in server.clients:
            self._check_rows(f"client {client}", server.sizes[client], module, umap=bool(self.geometry_pretrain))
        umap = bool(self.geometry_pretrain or self.geometry_federated)
        self._check_rows("the synthetic set (n_synthetic)", self.n_synthetic, module, umap=umap)

    def start(self, server: Server) -> FedDCNState:
        """Stages 1 and 2 of Alg. 2: lines 1 to 5."""
        weights = server.module.snapshot()
        with server.stage("local"):
            synthetic = self._synthesise(server, weights)
        with server.stage("geometry"):
            geometry = self._embed(server, synthetic)
        with server.stage("server"):
            server.progress("initialising the global model on synthetic rows")
            server.module.load_exchanged(weights)
            plan = self._local_plan(server)
            target = geometry if self.geometry_pretrain else None
            centers = deep_clustering(server.module).learn_from(plan, server.context, synthetic, target)
        return FedDCNState(server.module.snapshot(), centers, synthetic, geometry)

    def _synthesise(self, server: Server, weights: dict[str, Tensor]) -> Tensor:
        module, rng = deep_clustering(server.module), server.rng("synthetic")
        share = allocate_rows(self.n_synthetic, [server.sizes[client] for client in server.clients])
        shares = dict(zip(server.clients, share.tolist(), strict=True))
        parts: list[Tensor] = []
        done = 0

        def decode(client: int, reply: Message) -> None:
            nonlocal done
            done += 1
            server.progress(f"local DCN of client {client} ({done} of {len(server.clients)})")
            names = ("n_populated", "n_neighbors", "counts_fell_back", "outside_output")
            values = {f"local_{name.removeprefix('n_')}": read_number(reply, name) for name in names}
            server.client_values.setdefault(client, {}).update(values)
            rows = allocate_rows(shares[client], read_tensor(reply, "counts"))
            centers, spread = read_tensor(reply, "centers"), read_tensor(reply, "spread")
            z = sample_latents(centers, spread, rows, covariance=self.covariance, generator=rng)
            module.load_decoder(tensors_under("decoder", reply))
            parts.append(module.decode_rows(z))

        shared = {**with_prefix("weights", weights), **self._local_plan(server)}
        shared |= {"sampling": self.sampling, "counts": self.counts}
        server.ask("learn_locally", server.clients, shared=shared, on_reply=decode)
        self._note_local(server, module.n_clusters)
        synthetic = torch.cat(parts)
        if len(synthetic) < self.n_synthetic:
            server.note(f"stage 1: {len(synthetic)} synthetic rows instead of {self.n_synthetic}, as clients failed")
        return synthetic

    def _embed(self, server: Server, synthetic: Tensor) -> Tensor:
        latent_dim = deep_clustering(server.module).latent_dim
        if not self.geometry_pretrain and not self.geometry_federated:
            return torch.empty(0, latent_dim)
        server.progress("UMAP of the synthetic rows")
        embedding = umap_embedding(
            synthetic.numpy(), latent_dim, n_neighbors=self.n_neighbors, min_dist=self.min_dist,
            seed=server.context.seed_for("umap"), who="the synthetic set",
        )  # fmt: skip
        return torch.from_numpy(embedding.target)

    # -- rounds ---------------------------------------------------------------------------------------------------

    def round(self, state: State, cohort: list[int], server: Server) -> tuple[FedDCNState, Metrics]:
        """One round of Alg. 2: lines 7 to 20."""
        assert isinstance(state, FedDCNState)
        with server.stage("train"):
            weights, metrics = self._update(state, cohort, server)
        with server.stage("cluster"):
            centers = self._cluster(state, weights, cohort, server)
        return FedDCNState(weights, centers, state.synthetic, state.geometry), metrics

    def _update(self, state: FedDCNState, cohort: list[int], server: Server) -> tuple[dict[str, Tensor], Metrics]:
        average, terms = WeightedAverage(), TermMeans()

        def fold(client: int, reply: Message) -> None:
            rows, steps = read_number(reply, "n_rows"), read_number(reply, "n_steps")
            if not steps:
                server.note(f"client {client} made no training step and was not averaged")
                return
            average.add(tensors_under("weights", reply), rows, name=f"client {client}")
            terms.add(reply, rows)
            server.client_values.setdefault(client, {})["n_steps"] = steps

        shared = {
            **with_prefix("weights", state.weights),
            **self._weights_message(self.geometry_federated),
            "centers": state.centers,
            "epochs": 1 if server.quick else self.round_epochs,
            "augment": self.augment,
        }
        if self.augment or self.geometry_federated:
            shared["synthetic"] = state.synthetic
        if self.geometry_federated:
            shared["geometry"] = state.geometry
        server.ask("update", cohort, shared=shared, on_reply=fold)
        return average.result(), terms.metrics()

    def _cluster(
        self, state: FedDCNState, weights: dict[str, Tensor], cohort: list[int], server: Server
    ) -> Tensor:  # fmt: skip
        shared = {**with_prefix("weights", weights), "centers": state.centers, "augment": self.augment}
        if self.augment:
            shared["synthetic"] = state.synthetic
        replies = server.ask("cluster", cohort, shared=shared)
        stacked = torch.cat(
            [read_tensor(reply, "centers")[read_tensor(reply, "populated")] for _, reply in sorted(replies.items())]
        )
        if len(stacked) < len(state.centers):
            server.note(
                f"round {server.context.round}: the clients populated {len(stacked)} centres in all, fewer than "
                f"{len(state.centers)}; the global centres were kept"
            )
            return state.centers
        result = kmeans(stacked, len(state.centers), init=state.centers, who="server")
        if result.n_populated < len(state.centers):
            server.note(f"server k-means over the clients' centres: {result.status}")
        return cast(Tensor, result.centers)

    # -- evaluation and prediction --------------------------------------------------------------------------------

    def model_message(self, state: State) -> Message:
        """The global weights and centres."""
        assert isinstance(state, FedDCNState)
        return {**with_prefix("weights", state.weights), "centers": state.centers}

    @classmethod
    def module_for(cls, state: State, module: ClientModule) -> ClientModule:
        """The global model, its centres set."""
        assert isinstance(state, FedDCNState)
        module.load_exchanged(state.weights)
        with torch.no_grad():
            cast(Any, module).centers.copy_(state.centers)
        return module

    # -- helpers --------------------------------------------------------------------------------------------------

    def _weights_message(self, geometry: float) -> Message:
        return {"recon_weight": self.recon_weight, "cluster_weight": self.cluster_weight, "geometry_weight": geometry}

    def _local_plan(self, server: Server) -> Message:
        return {
            **self._weights_message(self.geometry_pretrain),
            "pretrain_epochs": 1 if server.quick else self.pretrain_epochs,
            "cluster_epochs": 1 if server.quick else self.cluster_epochs,
            "n_neighbors": self.n_neighbors,
            "min_dist": self.min_dist,
        }

    def _check_rows(self, who: str, rows: int, module: DeepClusteringModule, *, umap: bool) -> None:
        least = max(2, module.n_clusters)
        if rows < least:
            raise ValueError(
                f"{who} has {rows} training row{'s' * (rows != 1)}, fewer than the {least} that "
                f"n_clusters={module.n_clusters} needs; use fewer clusters, fewer clients or a larger min_size of the "
                "partition"
            )
        if umap:
            check_umap_size(rows, module.latent_dim, self.n_neighbors, who)

    def _note_local(self, server: Server, n_clusters: int) -> None:
        """One sentence for each thing that went wrong in stage 1, with the clients it happened at."""

        def clients(value: str, wrong: Callable[[float], bool]) -> str:
            values = ((client, server.client_values.get(client, {}).get(value)) for client in server.clients)
            found = [client for client, number in values if number is not None and wrong(number)]
            return ", ".join(map(str, found[:10])) + (f" and {len(found) - 10} more" if len(found) > 10 else "")

        if few := clients("local_populated", lambda number: number < n_clusters):
            server.note(f"stage 1: fewer than {n_clusters} clusters populated at clients {few}; clients.csv has them")
        if fell := clients("local_counts_fell_back", bool):
            server.note(f"stage 1: no point lies within one σ of a centre at clients {fell}; assigned counts were used")
        if outside := clients("local_outside_output", bool):
            server.note(
                f"values outside [0, 1] at clients {outside}: a network that ends in a sigmoid cannot reproduce them; "
                'use DCN(output="linear") or scale="minmax"'
            )
