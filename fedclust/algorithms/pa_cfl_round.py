"""One round of PA-CFL, phase by phase (Sec. 5): what is asked of the users, and what passes between the two servers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedclust.algorithms.groups import group_metrics
from fedclust.algorithms.pa_cfl_servers import GRADIENT_METRICS, AggregationServer, ManagementServer, Router
from fedclust.clustering.linkage import separation, silhouette
from fedclust.clustering.spherical import SphericalClusters
from fedclust.clustering.trees import medoid_davies_bouldin
from fedclust.federation.algorithm import Metrics, Server
from fedclust.federation.averaging import TermMeans, weighted_average
from fedclust.federation.message import Message, with_prefix
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
        self.groups: dict[int, int] | None = None
        self.clusters: dict[int, int] = {}

    def describe(self) -> Metrics:
        """Sec. 5.2: local training; sequences to the management server."""
        terms = TermMeans()

        def receive(user: int, reply: Message) -> None:
            message = self.router.part("ms", f"client {user}", reply)
            self.ms.receive(user, message)
            terms.add(reply, float(torch.as_tensor(message["n_rows"])))

        shared: Message = {
            **with_prefix("weights", self.state.initial),
            "epochs": 1 if self.server.quick else self.settings.round_epochs,
            "k": self.k,
            "reveal_gradient": self.settings.similarity in GRADIENT_METRICS,
        }
        self.server.ask("describe", self.users, shared=shared, on_reply=receive)
        self.users = sorted(self.ms.sequences)
        return terms.metrics()

    def pre_cluster(self) -> Metrics:
        """Sec. 5.3 and 5.4: π^g, and the pre-clusters of this round's users."""
        if not self.settings.pre_clustering:
            return {"clusters/pre": 1.0}
        if not self._clusters_again():
            known = self.state.pre_clusters.tolist()
            self.groups = {user: known[user] for user in self.users}
            return {"clusters/pre": float(len(set(self.groups.values())))}
        self.distances = self.ms.distances()
        found = self.ms.pre_clusters(self.distances)
        self.groups = dict(zip(self.users, found.labels.tolist(), strict=True))
        metrics = {"clusters/pre": float(len(found.clusters))}
        if found.dbi is not None:
            metrics["clusters/dbi"] = found.dbi
        return metrics

    def protect(self) -> Metrics:
        """Sec. 5.5: Φ from the norms; important values to the aggregation server, the others through the shuffle."""
        settings = self.settings
        self._ask("measure", {"ranking": self.ms.ranking(self.k)})
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
        found = self._final_clusters(vectors)
        aggregates = self.aggregator.aggregates(vectors, found)
        steps = aggregates[found.labels]
        period = self.settings.sync_period
        synchronised = period is not None and self.server.context.round % period == 0
        if synchronised:
            step = self.aggregator.global_step(aggregates, found.labels, self.settings.global_step)
            steps = step.expand(len(self.users), -1)
        self.clusters = dict(zip(self.users, found.labels.tolist(), strict=True))
        buffers = self._buffers()
        to = {
            user: {"aggregate": steps[row], **with_prefix("buffers", buffers[self.clusters[user]])}
            for row, user in enumerate(self.users)
        }
        self.server.ask("absorb", to)
        return {
            "clusters/synchronised": float(synchronised),
            "bytes/ms_received": float(self.router.received["ms"]),
            "bytes/as_received": float(self.router.received["as"]),
            **self._quality(),
        }

    def next_state(self) -> PrivateAdaptiveState:
        """The state after the round; users that were not asked keep what is known of them."""
        sequences, pre = self.state.first_sequences.clone(), self.state.pre_clusters.clone()
        final = self.state.clusters.clone()
        for user in self.users:
            if int(sequences[user, 0]) < 0:
                sequences[user] = self.ms.sequences[user].to(sequences)
            pre[user] = 0 if self.groups is None else self.groups[user]
            final[user] = self.clusters[user]
        return replace(
            self.state, first_sequences=sequences, pre_clusters=pre, clusters=final, ledger=self.ledger.state()
        )

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _ask(self, action: str, shared: Message) -> None:
        def receive(user: int, reply: Message) -> None:
            for receiver, take in (("ms", self.ms.receive), ("as", self.aggregator.receive)):
                part = self.router.part(receiver, f"client {user}", reply)
                if part:
                    take(user, part)

        self.server.ask(action, self.users, shared=shared, on_reply=receive)
        if action == "measure":
            self.users = sorted(self.ms.norms)

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
        self.server.note(
            "the privacy figures cover the less important coordinates only: sequences, norms, important values and "
            "BatchNorm buffers carry no differential privacy"
        )
        ratio = 2 * math.sqrt(2 * d2) / self.settings.epsilon
        if ratio > 1:
            self.server.note(
                f"at ε₀ = {self.settings.epsilon:g} a user's noise has about {ratio:.3g} times the norm of what it "
                "hides: expect little or no learning; see docs/pa_cfl.md"
            )

    def _final_clusters(self, vectors: Tensor) -> SphericalClusters:
        if self._clusters_again():
            return self.aggregator.clusters(vectors, self.settings.fine_clustering)
        known = self.state.clusters.tolist()
        self.aggregator.groups = {user: known[user] for user in self.users}
        return self.aggregator.clusters(vectors, refine=False)

    def _clusters_again(self) -> bool:
        known = self.state.clusters.tolist()
        due = (self.server.context.round - 1) % self.settings.recluster_every == 0
        return due or any(known[user] < 0 for user in self.users)

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
        labels = [self.clusters[user] for user in self.users]
        distances = getattr(self, "distances", None)
        if distances is not None and len(distances) == len(labels):
            for name, value in (
                ("clusters/silhouette", silhouette(distances, labels)),
                ("clusters/delta", separation(distances, labels)),
                ("clusters/dbi_final", medoid_davies_bouldin(distances, labels)),
            ):
                if value is not None:
                    metrics[name] = value
        return metrics | group_metrics(self.server, self.clusters)
