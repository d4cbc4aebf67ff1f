"""FMCL (arXiv 2604.27510): clients grouped once by class-wise signatures, then one model per group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedclust.algorithms.cluster_models import ClusterModelAlgorithm, ClusterModelState, repeated
from fedclust.algorithms.groups import group_metrics, nearest_cluster
from fedclust.checks import positive_int
from fedclust.clustering.automatic import AutomaticClusters, automatic_clusters
from fedclust.clustering.linkage import average_linkage_cuts
from fedclust.clustering.signatures import Signature, SignatureDistances, check_far, mean_signature, signature_distances
from fedclust.federation.algorithm import Metrics, Server, State
from fedclust.federation.client import ClientModule
from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message, Value, read_tensor


@dataclass
class FMCLState(ClusterModelState):
    """Models, groups, and what they were made from.

    Attributes:
        signatures: `<client>/classes`, `<client>/means` and `<client>/weights` of every client that holds rows.
        center: (d,) what is taken off all means; zeros without centring.
        distances: (n, n) float64 between the clients of `signatures`, ascending.
        curve: (m, 2) float64: number of clusters and its mean silhouette, for each number that was tried.
        overlap_scaling: As the algorithm was told, like the next two; for clients that come later.
        far_factor: Likewise.
        far_percentile: Likewise.
    """

    signatures: dict[str, Tensor]
    center: Tensor
    distances: Tensor
    curve: Tensor
    overlap_scaling: bool
    far_factor: float
    far_percentile: float


class FMCL(ClusterModelAlgorithm):
    """Groups clients before training, by what a frozen encoder says of their classes, and trains a model per group.

    Grouping costs each client one message: mean embedding and share of every class that it holds. Nothing of it is
    protected.

    Args:
        round_epochs: Local epochs per round; 0 groups clients without training.
        n_clusters: K; None chooses it by silhouette.
        center: Whether the clients' mean signature is taken off before cosines are computed.
        overlap_scaling: Whether distances are divided by the share of classes in common; False is the ablation.
        far_factor: How far clients without a common class are apart; see `signature_distances`.
        far_percentile: Likewise.

    Raises:
        ValueError: Naming the argument, its value and what is allowed.
    """

    client_actions: ClassVar[tuple[str, ...]] = ("describe_classes", "update")
    client_class: ClassVar[str] = "lightning_modules.FMCLClient"
    state_class: ClassVar[type[State]] = FMCLState

    def __init__(
        self,
        round_epochs: int = 1,
        n_clusters: int | None = None,
        center: bool = True,
        overlap_scaling: bool = True,
        far_factor: float = 2.0,
        far_percentile: float = 99.0,
    ) -> None:
        super().__init__(round_epochs)
        self.n_clusters = None if n_clusters is None else positive_int("n_clusters", n_clusters)
        self.center, self.overlap_scaling = center, overlap_scaling
        self.far_factor, self.far_percentile = check_far(far_factor, far_percentile)

    def check(self, server: Server) -> None:
        """Refuses more clusters than clients."""
        if self.n_clusters is not None and self.n_clusters > len(server.clients):
            raise ValueError(f"n_clusters is {self.n_clusters}, but only {len(server.clients)} clients hold rows")

    def start(self, server: Server) -> FMCLState:
        """Signatures of all clients, their distances, and the groups."""
        with server.stage("signatures"):
            replies = server.ask("describe_classes", server.clients)
        with server.stage("cluster"):
            signatures = [_signature(reply) for reply in replies.values()]
            center = mean_signature(signatures)
            center = center if self.center else torch.zeros_like(center)
            found = signature_distances(
                signatures, center=center, overlap_scaling=self.overlap_scaling,
                far_factor=self.far_factor, far_percentile=self.far_percentile,
            )  # fmt: skip
            groups = self._groups(found)
        self._explain(server, found, groups)
        clusters = torch.full((server.backend.data.n_clients,), -1)
        clusters[list(replies)] = torch.from_numpy(groups.labels)
        weights = server.module.snapshot()
        return FMCLState(
            models=repeated(weights, groups.n_clusters),
            initial=weights,
            clusters=clusters,
            signatures={
                f"{client}/{name}": read_tensor(reply, name)
                for client, reply in replies.items()
                for name in ("classes", "means", "weights")
            },
            center=center,
            distances=torch.from_numpy(found.distances),
            curve=torch.tensor([*groups.curve.items()], dtype=torch.float64).reshape(-1, 2),
            overlap_scaling=self.overlap_scaling,
            far_factor=self.far_factor,
            far_percentile=self.far_percentile,
        )

    def round(self, state: State, cohort: list[int], server: Server) -> tuple[FMCLState, Metrics]:
        """FedAvg inside every group."""
        assert isinstance(state, FMCLState)
        models, metrics = self.train(state, cohort, server)
        return replace(state, models=models), metrics | group_metrics(server, self.assignments(state))

    @classmethod
    def tables(cls, state: State) -> dict[str, list[dict[str, float]]]:
        """The silhouette by number of groups."""
        assert isinstance(state, FMCLState)
        return {"curve": [{"clusters": int(k), "silhouette": score} for k, score in state.curve.tolist()]}

    # -- after the run --------------------------------------------------------------------------------------------

    @classmethod
    def assign_client(cls, state: State, module: ClientModule, ctx: ClientContext) -> int:
        """The cluster whose clients' signatures are nearest on average to the new client's."""
        assert isinstance(state, FMCLState)
        known = cls.assignments(state)
        signatures = [_signature(cls.signature_of(state, client, {})) for client in known]
        signatures.append(_signature(module.act("describe_classes", {}, ctx)))
        found = signature_distances(
            signatures, center=state.center, overlap_scaling=state.overlap_scaling,
            far_factor=state.far_factor, far_percentile=state.far_percentile,
        )  # fmt: skip
        return nearest_cluster(known.values(), found.distances[-1, :-1])

    @classmethod
    def signature_of(cls, state: State, client: int, own: Mapping[str, Value]) -> Message:
        """The client's "classes" (C,), "means" (C, d) and "weights" (C,)."""
        assert isinstance(state, FMCLState)
        start = f"{client}/"
        found: Message = {
            name.removeprefix(start): value for name, value in state.signatures.items() if name.startswith(start)
        }
        if not found:
            raise ValueError(f"there is no signature of client {client!r}")
        return found

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _groups(self, found: SignatureDistances) -> AutomaticClusters:
        if self.n_clusters is None:
            return automatic_clusters(found.distances)
        count, answered = self.n_clusters, len(found.distances)
        if count > answered:
            raise ValueError(f"n_clusters is {count}, but only {answered} clients sent their signature")
        if count == 1:
            return AutomaticClusters(np.zeros(answered, dtype=np.int64), 1)
        return AutomaticClusters(average_linkage_cuts(found.distances, [count])[count], count)

    @staticmethod
    def _explain(server: Server, found: SignatureDistances, groups: AutomaticClusters) -> None:
        text = f"K = {groups.n_clusters}"
        if groups.reason is not None:
            text += f": {groups.reason}" + ("" if found.reason is None else f" ({found.reason})")
        if groups.curve:
            text += "; silhouette by K: " + ", ".join(f"{k}: {score:.3f}" for k, score in groups.curve.items())
        server.note(text)


def _signature(message: Any) -> Signature:
    return Signature(read_tensor(message, "classes"), read_tensor(message, "means"), read_tensor(message, "weights"))
