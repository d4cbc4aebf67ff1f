"""PA-CFL: privacy-preserving adaptive clustered federated learning.

The class is `PrivateAdaptiveCFL`, because PACFL is another method's name (principal angles, Vahidian et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclust.algorithms.groups import nearest_cluster
from fedclust.algorithms.pa_cfl_round import Round
from fedclust.algorithms.pa_cfl_servers import Observer
from fedclust.algorithms.supervised import OwnModelAlgorithm, OwnModelState
from fedclust.checks import choice, fraction, positive, positive_int, true_or_false
from fedclust.clustering.distances import GRADIENT_METRICS, SEQUENCE_METRICS, distances_to
from fedclust.federation.algorithm import Metrics, Server, State
from fedclust.federation.client import ClientModule, parameter_count
from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message, read_tensor, with_prefix
from fedclust.privacy.importance import count_of
from fedclust.privacy.laplace import coordinate_scale
from fedclust.privacy.ledger import Ledger

Similarity = Literal[
    "dtw", "fastdtw", "index_overlap", "rank_overlap", "l2", "l1", "cosine", "pearson", "max_norm", "mahalanobis"
]

# Far below any δ that says something; the ledger's bounds need room below it in float64.
_SMALLEST_DELTA = 1e-100


@dataclass
class PrivateAdaptiveState(OwnModelState):
    """What the servers know between rounds.

    Attributes:
        first_sequences: (N, k) each user's sequence at its first round, all taken at the initial weights; −1 unseen.
        pre_clusters: (N,) pre-cluster of each user when it last took part; −1 for a user never seen.
        clusters: (N,) final cluster, likewise.
        clustered_in: (N,) round of the clustering that both numbers come from; −1 for a user never seen. Numbers of
            different rounds do not compare.
        ledger: What the privacy ledger recorded.
        similarity: How sequences are compared; with `radius` and `round_epochs`, for clients that come later.
        radius: Radius of FastDTW.
        round_epochs: Local epochs of a round.
    """

    first_sequences: Tensor
    pre_clusters: Tensor
    clusters: Tensor
    clustered_in: Tensor
    ledger: dict[str, Tensor]
    similarity: str
    radius: int
    round_epochs: int


class PrivateAdaptiveCFL(OwnModelAlgorithm):
    """Groups users by the coordinates that their gradients move most, and aggregates inside the groups (Sec. 5).

    Every user has a model of its own. The formal guarantee covers the less important coordinates only: sequences,
    norms, important values and BatchNorm buffers carry no differential privacy.

    Args:
        round_epochs: R, local epochs per round.
        top_k: Share of the coordinates in a sequence; k = max(1, floor(top_k · d)).
        similarity: Distance between users. "dtw" is the paper's definition (exact), "fastdtw" its approximation;
            "index_overlap" and "rank_overlap" compare the index sets. "l2", "l1", "cosine", "pearson", "max_norm" and
            "mahalanobis" compare the gradients themselves, which then reach the management server: for comparisons,
            and only without `privacy`.
        radius: Radius of FastDTW.
        epsilon: ε₀, the budget of one coordinate.
        delta: δ of the ledger's statements.
        privacy: Whether less important values are clipped, randomised and shuffled (module PB).
        pre_clustering: Whether users are grouped by their sequences (PC); without it all are shuffled together and
            fine clustering starts from average linkage.
        fine_clustering: Whether the groups are refined (FC).
        sync_period: κ: every κ-th round all users get the global aggregate; None never.
        global_step: "unit" is the paper's mean of unit vectors, which moves a model by at most η; "mean_norm" gives it
            the clusters' mean norm.
        recluster_every: Rounds between clusterings. A round whose users were not all clustered in one and the same
            round clusters again, whatever this says: with changing cohorts that is nearly every round.
        max_reassignments: Cap on the iterations of fine clustering.
        noise: "secure" draws noise from the operating system; "simulated" from the run's seed, which protects nothing.

    Attributes:
        observer: Told (receiver, sender, message) of every message from and to a server; None tells nobody.

    Raises:
        ValueError: Naming the argument, its value and what is allowed.
    """

    client_actions: ClassVar[tuple[str, ...]] = ("describe", "measure", "protect", "absorb")
    client_class: ClassVar[str] = "lightning_modules.PrivateAdaptiveClient"
    state_class: ClassVar[type[State]] = PrivateAdaptiveState

    def __init__(
        self,
        round_epochs: int = 3,
        top_k: float = 0.0025,
        similarity: Similarity = "dtw",
        radius: int = 1,
        epsilon: float = 1.0,
        delta: float = 1e-5,
        privacy: bool = True,
        pre_clustering: bool = True,
        fine_clustering: bool = True,
        sync_period: int | None = 10,
        global_step: Literal["unit", "mean_norm"] = "unit",
        recluster_every: int = 1,
        max_reassignments: int = 100,
        noise: Literal["secure", "simulated"] = "secure",
    ) -> None:
        self.round_epochs = positive_int("round_epochs", round_epochs)
        self.top_k = positive("top_k", top_k)
        if top_k > 1:
            raise ValueError(f"top_k is a share of the coordinates, at most 1, got {top_k!r}")
        self.similarity = choice("similarity", similarity, (*SEQUENCE_METRICS, *GRADIENT_METRICS))
        self.radius = positive_int("radius", radius)
        self.epsilon = positive("epsilon", epsilon)
        coordinate_scale(1.0, self.epsilon)
        self.delta = positive("delta", fraction("delta", delta))
        if self.delta < _SMALLEST_DELTA:
            raise ValueError(f"delta must be at least {_SMALLEST_DELTA:g}, got {delta!r}")
        self.privacy = true_or_false("privacy", privacy)
        if self.privacy and similarity in GRADIENT_METRICS:
            raise ValueError(
                f"similarity {similarity!r} sends whole gradients to the management server, so noise would protect "
                f"nothing: set privacy to false, or similarity to one of {', '.join(SEQUENCE_METRICS)}"
            )
        self.pre_clustering = true_or_false("pre_clustering", pre_clustering)
        self.fine_clustering = true_or_false("fine_clustering", fine_clustering)
        self.sync_period = None if sync_period is None else positive_int("sync_period", sync_period)
        self.global_step = choice("global_step", global_step, ("unit", "mean_norm"))
        self.recluster_every = positive_int("recluster_every", recluster_every)
        self.max_reassignments = positive_int("max_reassignments", max_reassignments)
        self.noise = choice("noise", noise, ("secure", "simulated"))
        self.observer: Observer | None = None

    def start(self, server: Server) -> PrivateAdaptiveState:
        """The initial weights, nobody clustered."""
        users, k = server.backend.data.n_clients, self._k(server)
        return PrivateAdaptiveState(
            initial=server.module.snapshot(),
            first_sequences=torch.full((users, k), -1),
            pre_clusters=torch.full((users,), -1),
            clusters=torch.full((users,), -1),
            clustered_in=torch.full((users,), -1),
            ledger=Ledger(self.delta).state(),
            similarity=self.similarity,
            radius=self.radius,
            round_epochs=self.round_epochs,
        )

    # -- one round ------------------------------------------------------------------------------------------------

    def round(self, state: State, cohort: list[int], server: Server) -> tuple[PrivateAdaptiveState, Metrics]:
        """The six phases of Sec. 5 with the users of the cohort.

        Raises:
            ValueError: If the state is that of a run with another `top_k`, whose sequences do not compare, or with
                another `privacy`, of which no ε could be told.
        """
        assert isinstance(state, PrivateAdaptiveState)
        k, before = self._k(server), state.first_sequences.shape[1]
        if k != before:
            raise ValueError(
                f"top_k {self.top_k:g} makes sequences of length {k}, but the checkpoint was made with {before}"
            )
        private = len(state.ledger["rounds"])
        if private != (server.context.round - 1 if self.privacy else 0):
            raise ValueError(
                f"privacy is {str(self.privacy).lower()}, but of the {server.context.round - 1} rounds before this one "
                f"{private} were private, so no ε would hold: go on as the run began, or start a new one"
            )
        current = Round(self, state, server, cohort, k)
        metrics: Metrics = {}
        phases = (
            ("train", current.describe), ("pre-cluster", current.pre_cluster), ("protect", current.protect),
            ("aggregate", current.aggregate),
        )  # fmt: skip
        for name, phase in phases:
            spent = server.seconds.get(name, 0.0)
            with server.stage(name):
                metrics |= phase()
            metrics[f"seconds/{name}"] = server.seconds[name] - spent
        return current.next_state(), metrics

    def metric_names(self, labels: bool) -> frozenset[str]:
        """What validation gives, and what every clustering says of itself without labels.

        A round with one cluster has no `clusters/silhouette`, `clusters/delta` and Davies-Bouldin indices.
        """
        names = {"clusters/pre", "clusters/final"}
        if self.pre_clustering:
            names |= {"clusters/silhouette", "clusters/delta", "clusters/dbi", "clusters/dbi_final"}
        if self.privacy:
            names |= {"privacy/epsilon_round", "privacy/epsilon_total", "privacy/delta"}
        return super().metric_names(labels) | names

    # -- after the run --------------------------------------------------------------------------------------------

    @classmethod
    def assignments(cls, state: State) -> dict[int, int]:
        """User → final cluster of the last round in which it took part.

        Clusters of different rounds have different numbers, those of the latest clustering the lowest ones: users that
        were never clustered together are in no common cluster.
        """
        assert isinstance(state, PrivateAdaptiveState)
        found: dict[int, int] = {}
        first = 0
        for clustering in sorted({number for number in state.clustered_in.tolist() if number >= 0}, reverse=True):
            members = torch.nonzero(state.clustered_in == clustering).flatten()
            found |= dict(zip(members.tolist(), (first + state.clusters[members]).tolist(), strict=True))
            first = max(found.values()) + 1
        return dict(sorted(found.items()))

    @classmethod
    def assign_client(cls, state: State, module: ClientModule, ctx: ClientContext) -> int:
        """The cluster whose users' first sequences are nearest on average to the new user's (ours; not in the paper).

        All these sequences were taken at the initial weights, so they compare. The new user trains one round there and
        reveals its sequence, as every user does. Where the run compared gradients, of which no server keeps any, the
        overlap of the index sets is taken. Ties go to the lower cluster.

        Raises:
            ValueError: Before the first round.
        """
        assert isinstance(state, PrivateAdaptiveState)
        clusters = cls.assignments(state)
        if not clusters:
            raise ValueError("no user has a cluster yet: run at least one round first")
        message: Message = {
            **with_prefix("weights", state.initial),
            "epochs": state.round_epochs,
            "k": state.first_sequences.shape[1],
            "reveal_gradient": False,
        }
        own = read_tensor(module.act("describe", message, ctx), "ms/sequence")
        metric = state.similarity if state.similarity in SEQUENCE_METRICS else "index_overlap"
        firsts = [state.first_sequences[user].numpy() for user in clusters]
        distances = distances_to(own.numpy(), firsts, metric, radius=state.radius)
        return nearest_cluster(clusters.values(), distances.tolist())

    def _k(self, server: Server) -> int:
        return count_of(self.top_k, parameter_count(server.module))
