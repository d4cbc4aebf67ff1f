"""One round of PA-CFL, phase by phase (Sec. 5): what is asked of the users, and what passes between the two servers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclust.algorithms.groups import group_metrics
from fedclust.algorithms.pa_cfl_servers import AggregationServer, ManagementServer, Router
from fedclust.clustering.distances import GRADIENT_METRICS
from fedclust.clustering.linkage import separation, silhouette
from fedclust.clustering.trees import medoid_davies_bouldin
from fedclust.federation.algorithm import Metrics, Server
from fedclust.federation.averaging import TermMeans, weighted_average
from fedclust.federation.message import Message, read_number, with_prefix
from fedclust.privacy.ledger import Ledger
from fedclust.privacy.randomness import random_source

if TYPE_CHECKING:
    from fedclust.algorithms.pa_cfl import PrivateAdaptiveCFL, PrivateAdaptiveState


class Round:
    """The phases of one round with the users of a cohort.

    Args:
        settings: The algorithm's arguments.
        state: The state before the round.
        server: Carries the messages.
        cohort: Users asked; those that fail are left out of all later phases.
        k: Length of the sequences.
    """

    def __init__(
        self, settings: PrivateAdaptiveCFL, state: PrivateAdaptiveState, server: Server, cohort: list[int], k: int
    ) -> None:
        self.settings, self.state, self.server, self.k = settings, state, server, k
        self.users = list(cohort)
        self.router = Router(settings.observer)
        self.ms = ManagementServer(settings.similarity, settings.radius)
        self.aggregator = AggregationServer(settings.max_reassignments)
        self.ledger = Ledger(settings.delta)
        self.ledger.load_state(state.ledger)
        self.again = True
        self.distances: NDArray[np.float64] | None = None
        self.groups: dict[int, int] | None = None
        self.clusters: dict[int, int] = {}

    def describe(self) -> Metrics:
        """Sec. 5.2: local training; sequences to the management server."""
        terms = TermMeans()

        def receive(user: int, reply: Message) -> None:
            message = self.router.part("ms", f"client {user}", reply)
            self.ms.receive(user, message)
            terms.add(reply, read_number(message, "n_rows"))

        shared: Message = {
            **with_prefix("weights", self.state.initial),
            "epochs": 1 if self.server.quick else self.settings.round_epochs,
            "k": self.k,
            "reveal_gradient": self.settings.similarity in GRADIENT_METRICS,
        }
        self.server.ask("describe", self.users, shared=shared, on_reply=receive)
        self.users = sorted(self.ms.sequences)
        self.again = self._clusters_again()
        return terms.metrics()

    def pre_cluster(self) -> Metrics:
        """Sec. 5.4: the pre-clusters of this round's users."""
        if not self.settings.pre_clustering:
            return {"clusters/pre": 1.0}
        if not self.again:
            known = self.state.pre_clusters.tolist()
            self.groups = {user: known[user] for user in self.users}
            return {"clusters/pre": float(len(set(self.groups.values())))}
        self.distances = self.ms.distances(self._tell)
        found = self.ms.pre_clusters(self.distances)
        if len(found.clusters) == 1:
            self.server.note(f"one pre-cluster in at least one round: {found.reason}")
        self.groups = dict(zip(self.users, found.labels.tolist(), strict=True))
        metrics = {"clusters/pre": float(len(found.clusters))}
        if found.dbi is not None:
            metrics["clusters/dbi"] = found.dbi
        return metrics

    def protect(self) -> Metrics:
        """Sec. 5.3 and 5.5: π^g; Φ from the norms; important values to the AS, the others through the shuffle."""
        settings = self.settings
        self._ask("measure", {"ranking": self.ms.ranking(self.k)})
        self.users = sorted(self.ms.norms)
        shared: Message = {"private": settings.privacy}
        if settings.privacy:
            shared |= {"bound": self.ms.bound(), "epsilon": settings.epsilon, "noise": settings.noise}
        self._ask("protect", shared)
        self.users = self.aggregator.clients
        message: Message = {}
        if self.groups is not None:
            groups = torch.tensor([self.groups[user] for user in self.users])
            message |= {"clients": torch.tensor(self.users), "groups": groups}
        if settings.privacy:
            message |= self._shuffle()
        if message:
            self.aggregator.receive_shuffled(self.router.deliver("as", "ms", message))
        return self.ledger.metrics() if settings.privacy else {}

    def aggregate(self) -> Metrics:
        """Sec. 5.6 and 5.7: final clusters, aggregates, and their way back to the users."""
        vectors = self.aggregator.vectors()
        if self.again:
            found = self.aggregator.clusters(vectors, self.settings.fine_clustering)
            numbers = torch.unique(found.labels).tolist()
        else:
            found, numbers = self.aggregator.known_clusters(vectors, dict(enumerate(self.state.clusters.tolist())))
        if not found.converged:
            self.server.note(
                f"fine clustering reached its cap of {self.settings.max_reassignments} in at least one round"
            )
        self.clusters = {user: numbers[label] for user, label in zip(self.users, found.labels.tolist(), strict=True)}
        aggregates = self.aggregator.aggregates(vectors, found)
        del vectors
        period = self.settings.sync_period
        synchronised = period is not None and self.server.context.round % period == 0
        # One tensor per cluster, not per user: it is sent, counted and kept as one.
        steps = list(aggregates)
        if synchronised:
            steps = [self.aggregator.global_step(aggregates, found.labels, self.settings.global_step)] * len(steps)
        self._send_back(dict(zip(numbers, steps, strict=True)))
        return {"clusters/synchronised": float(synchronised), **self.router.metrics(), **self._quality()}

    def next_state(self) -> PrivateAdaptiveState:
        """The state after the round; users that were not asked keep what is known of them."""
        state, settings = self.state, self.settings
        sequences = state.first_sequences
        new = [user for user in self.users if int(sequences[user, 0]) < 0]
        if new:
            sequences = sequences.clone()
            sequences[new] = torch.stack([self.ms.sequences[user] for user in new]).to(sequences)
        pre, final, clustered = state.pre_clusters.clone(), state.clusters.clone(), state.clustered_in.clone()
        for user in self.users:
            pre[user] = 0 if self.groups is None else self.groups[user]
            final[user] = self.clusters[user]
            if self.again:
                clustered[user] = self.server.context.round
        return replace(
            state, first_sequences=sequences, pre_clusters=pre, clusters=final, clustered_in=clustered,
            ledger=self.ledger.state(), similarity=settings.similarity, radius=settings.radius,
            round_epochs=settings.round_epochs,
        )  # fmt: skip

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _ask(self, action: str, shared: Message) -> None:
        """Asks all users of the round for the management server, and hands each server its part of the replies."""

        def receive(user: int, reply: Message) -> None:
            for receiver, take in (("ms", self.ms.receive), ("as", self.aggregator.receive)):
                part = self.router.part(receiver, f"client {user}", reply)
                if part:
                    take(user, part)

        for user in self.users:
            self.router.deliver(f"client {user}", "ms", shared)
        self.server.ask(action, self.users, shared=shared, on_reply=receive)

    def _send_back(self, steps: dict[int, Tensor]) -> None:
        """Each user gets its cluster's aggregate and BatchNorm buffers."""
        buffers, to = self._buffers(), {}
        for user in self.users:
            cluster = self.clusters[user]
            message: Message = {"aggregate": steps[cluster], **with_prefix("buffers", buffers[cluster])}
            to[user] = self.router.deliver(f"client {user}", "as", message)
        self.server.ask("absorb", to)

    def _tell(self, done: int, pairs: int) -> None:
        self.server.progress(f"distances of users: {done} of {pairs} pairs")

    def _shuffle(self) -> Message:
        """Shuffles inside the pre-clusters (all users without them) and records what that is worth."""
        context = self.server.context
        groups = self.groups or dict.fromkeys(self.users, 0)
        source = random_source(self.settings.noise, context.seed, context.round, "ms", "shuffle")
        d2 = len(self.ms.less[self.users[0]])
        mixed, alone = self.ms.shuffled(groups, source)
        if alone:
            self.server.note(f"users {alone} were alone in their pre-cluster: nothing was amplified for them")
        members: dict[int, list[int]] = {}
        for user in self.users:
            members.setdefault(groups[user], []).append(user)
        self.ledger.record(members.values(), d2, self.settings.epsilon, self.ms.bound())
        self._explain(d2)
        return {f"less/{user}": values for user, values in mixed.items()}

    def _explain(self, d2: int) -> None:
        """Says what the ledger's figures cover, and how large the noise is: b = 2Φ/ε₀ and a norm of b·√(2·d₂)."""
        note, settings = self.server.note, self.settings
        note(
            "the privacy figures cover the less important coordinates only: sequences, norms, important values and "
            "BatchNorm buffers carry no differential privacy"
        )
        bound = self.ledger.worst_total().smallest
        note(f"privacy/epsilon_total is the bound {bound.name!r}; it holds against {bound.against}")
        if settings.noise == "simulated":
            note(
                "noise='simulated' comes from the run's seed and protects nobody: the privacy figures are those of the "
                "same mechanism with noise='secure'"
            )
        ratio = 2 * math.sqrt(2 * d2) / settings.epsilon
        if ratio > 1:
            note(
                f"at ε₀ = {settings.epsilon:g} a user's noise has about {ratio:.3g} times the norm of what it "
                "hides: expect little or no learning, and models that stop being finite; see docs/pa_cfl.md"
            )

    def _clusters_again(self) -> bool:
        """Whether this round clusters: numbers of clusters are kept only if all users got them in one clustering."""
        due = (self.server.context.round - 1) % self.settings.recluster_every == 0
        rounds = set(self.state.clustered_in[self.users].tolist())
        return due or len(rounds) > 1 or -1 in rounds

    def _buffers(self) -> dict[int, dict[str, Tensor]]:
        """BatchNorm buffers averaged inside each cluster by numbers of rows, without noise."""
        averaged: dict[int, dict[str, Tensor]] = {cluster: {} for cluster in self.clusters.values()}
        for cluster in averaged:
            users = [user for user in self.users if self.clusters[user] == cluster]
            if not self.aggregator.buffers[users[0]]:
                continue
            averaged[cluster] = weighted_average(
                [self.aggregator.buffers[user] for user in users],
                [self.aggregator.sizes[user] for user in users],
                names=[f"client {user}" for user in users],
            )
        return averaged

    def _quality(self) -> Metrics:
        """How well the final clusters separate, on distances where there are any, and against planted groups."""
        metrics: Metrics = {}
        if self.distances is not None:
            asked = sorted(self.ms.sequences)
            rows = [asked.index(user) for user in self.users]
            distances = self.distances[np.ix_(rows, rows)]
            labels = [self.clusters[user] for user in self.users]
            for name, value in (
                ("clusters/silhouette", silhouette(distances, labels)),
                ("clusters/delta", separation(distances, labels)),
                ("clusters/dbi_final", medoid_davies_bouldin(distances, labels)),
            ):
                if value is not None:
                    metrics[name] = value
        return metrics | group_metrics(self.server, self.clusters)
