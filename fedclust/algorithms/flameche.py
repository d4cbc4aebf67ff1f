"""FLAMECHE: clients grouped during training by expectation-maximisation over metadata, with additions only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclust.algorithms.cluster_models import ClusterModelAlgorithm, repeated
from fedclust.algorithms.flameche_state import FLAMECHEState, inherited, matching, require_same, sizes
from fedclust.algorithms.flameche_sums import (
    after_refusal,
    combinations,
    only,
    survivors_only,
    warn_of_starts,
    without_exposure,
)
from fedclust.algorithms.groups import group_metrics
from fedclust.algorithms.summing import require_two_clients, sum_over_clients
from fedclust.checks import choice, positive, positive_int
from fedclust.clustering.mixtures import MIXTURES, Mixture, spread_slots
from fedclust.federation.algorithm import Metrics, Server, State
from fedclust.federation.client import ClientModule
from fedclust.federation.context import ClientContext
from fedclust.federation.errors import RoundFailedError
from fedclust.federation.message import Message, Value, read_tensor
from fedclust.privacy.aggregation import NoSum, Sum
from fedclust.privacy.exposure import extended
from fedclust.privacy.sums import MODES, make_aggregation


class FLAMECHE(ClusterModelAlgorithm):
    """Alternates one E-step on the clients and one M-step on the server per round, beside training a model per cluster.

    Metadata are class-wise means of a client's features under a random network that all clients draw from one seed. A
    client compares them with the centroids itself; the server only adds.

    Args:
        n_clusters: K.
        round_epochs: Local epochs per round; 0 groups clients without training.
        mixture: "spherical" is the paper's spherical k-means; "gaussian" and "multinomial" are of its family [ours].
        n_init: Starts that run side by side in the same messages; the one with the smallest summed error counts [ours].
            1 is the paper. None: 5, or 1 with protected sums, as every start tells the server further sums.
        recluster_every: τ: every so many rounds empty clusters are filled from the one with the highest mean error;
            None never.
        aggregation: "plain": the server gets each client's statistics, once. "secure_sum" and "ckks": of them it gets
            sums of changes only, from the clients of a round, and no sum from which a client's statistics would
            follow; assignments, errors and the models that clients train stay visible. See `docs/flameche.md`.
        sum_bound: Largest absolute value of a statistic in a protected sum; a client with a larger one is refused.

    Raises:
        ValueError: Naming the argument, its value and what is allowed.
    """

    client_actions: ClassVar[tuple[str, ...]] = ("describe_metadata", "locate", "update")
    client_class: ClassVar[str] = "lightning_modules.FLAMECHEClient"
    state_class: ClassVar[type[State]] = FLAMECHEState

    def __init__(
        self,
        n_clusters: int,
        round_epochs: int = 1,
        mixture: Literal["spherical", "gaussian", "multinomial"] = "spherical",
        n_init: int | None = None,
        recluster_every: int | None = 2,
        aggregation: Literal["plain", "secure_sum", "ckks"] = "plain",
        sum_bound: float = 1000.0,
    ) -> None:
        super().__init__(round_epochs)
        self.n_clusters = positive_int("n_clusters", n_clusters)
        self.mixture: Mixture = MIXTURES[choice("mixture", mixture, tuple(MIXTURES))]
        self.recluster_every = None if recluster_every is None else positive_int("recluster_every", recluster_every)
        self.aggregation = make_aggregation(choice("aggregation", aggregation, MODES))
        self.protected = aggregation != "plain"
        self.n_init = positive_int("n_init", n_init) if n_init is not None else 1 if self.protected else 5
        self.sum_bound = positive("sum_bound", sum_bound)

    def check(self, server: Server) -> None:
        """Refuses more clusters than clients, and protected sums of one client."""
        if self.protected:
            require_two_clients(server)
            warn_of_starts(server, self.n_init)
        if self.n_clusters > len(server.clients):
            raise ValueError(f"n_clusters is {self.n_clusters}, but only {len(server.clients)} clients hold rows")

    def start(self, server: Server) -> FLAMECHEState:
        """The initial weights in every cluster, nobody seen."""
        clients = server.backend.data.n_clients
        weights, nobody = server.module.snapshot(), torch.full((self.n_init, clients), -1)
        return FLAMECHEState(
            models=repeated(weights, self.n_clusters),
            initial=weights,
            clusters=nobody[0].clone(),
            parameters=torch.empty(0, dtype=torch.float64),
            slots=nobody,
            errors=torch.full((self.n_init, clients), torch.nan, dtype=torch.float64),
            statistics=torch.empty(0, dtype=torch.float64),
            sums=torch.empty(0, dtype=torch.float64),
            known=torch.empty(0, clients, dtype=torch.float64),
            best=0,
            mixture=self.mixture.name,
        )

    def round(self, state: State, cohort: list[int], server: Server) -> tuple[FLAMECHEState, Metrics]:
        """E-step, M-step, perhaps re-clustering, and local epochs with the clusters' models."""
        assert isinstance(state, FLAMECHEState)
        require_same(state, self.n_clusters, self.n_init, self.mixture.name, self.protected)
        with server.stage("cluster"):
            state, present = self._describe(state, cohort, server)
            if present:
                state, present = self._e_step(state, present, server)
                state = self._m_step(state)
                state = self._recluster(state, present, server)
                state = self._choose(state)
        models, metrics = self.train(state, present, server)
        state = replace(state, models=models)
        return state, metrics | group_metrics(server, self.assignments(state)) | self._figures(state)

    # -- the steps of a round -------------------------------------------------------------------------------------

    def _describe(self, state: FLAMECHEState, cohort: list[int], server: Server) -> tuple[FLAMECHEState, list[int]]:
        """Clients that were never seen describe their rows; the first of them also make Θ⁽⁰⁾."""
        new = [client for client in cohort if int(state.slots[0, client]) < 0]
        if not new:
            return state, cohort
        shared: Message = {"mixture": self.mixture.name, "reveal": not self.protected}
        try:
            replies = server.ask("describe_metadata", new, shared=shared)
        except RoundFailedError:
            if len(new) == len(cohort):
                raise
            return state, [client for client in cohort if client not in new]
        if not self.protected:
            state = self._with_statistics(state, replies, server)
        else:
            try:
                state = self._first_sums(state, replies, server)
            except NoSum as error:
                server.note(f"round {server.context.round}: nobody is grouped yet: {error}")
                return replace(state, known=after_refusal(error, state.known)), []
        return state, [client for client in cohort if client not in new or client in replies]

    def _with_statistics(self, state: FLAMECHEState, replies: dict[int, Message], server: Server) -> FLAMECHEState:
        told = {client: read_tensor(reply, "statistics") for client, reply in replies.items()}
        statistics = state.statistics
        if not statistics.numel():
            one = next(iter(told.values()))
            statistics = torch.zeros(state.slots.shape[1], *one.shape, dtype=torch.float64)
        statistics = statistics.clone()
        for client, value in told.items():
            statistics[client] = value
        state = replace(state, statistics=statistics)
        if state.parameters.numel():
            return state
        return self._first_centroids(state, torch.stack(list(told.values())).sum(0), len(told), server)

    def _first_sums(self, state: FLAMECHEState, replies: dict[int, Message], server: Server) -> FLAMECHEState:
        if state.parameters.numel():
            return state
        shape = tuple(read_tensor(next(iter(replies.values())), "shape").tolist())
        state = replace(state, sums=torch.zeros(self.n_init, self.n_clusters, *shape, dtype=torch.float64))
        overall, count = torch.zeros(shape, dtype=torch.float64), len(replies)
        if self.mixture.needs_overall:
            add: Message = {"counted": torch.tensor([-1]), "target": torch.tensor([0]), "components": 1}
            to = dict.fromkeys(replies, add)
            everyone = torch.ones(1, state.slots.shape[1], dtype=torch.float64)
            total, known = self._sum(server, state, to, everyone, overall.numel())
            overall, count = torch.from_numpy(total.total).reshape(shape), total.count
            state = replace(state, known=known)
        return self._first_centroids(state, overall, count, server)

    def _first_centroids(self, state: FLAMECHEState, overall: Tensor, count: int, server: Server) -> FLAMECHEState:
        generator = server.rng("centroids")
        return replace(state, parameters=self.mixture.start(self.n_init, self.n_clusters, overall, count, generator))

    def _e_step(self, state: FLAMECHEState, present: list[int], server: Server) -> tuple[FLAMECHEState, list[int]]:
        """Each client finds its nearest centroid in every start."""
        shared: Message = {"parameters": state.parameters.float(), "mixture": self.mixture.name}
        replies = server.ask("locate", present, shared=shared)
        slots = state.slots.clone()
        for client, reply in replies.items():
            slots[:, client] = read_tensor(reply, "slots")
        state, moved = self._move(state, slots, list(replies), server)
        errors = state.errors.clone()
        for client in moved:
            errors[:, client] = read_tensor(replies[client], "errors")
        return replace(state, errors=errors), list(replies)

    def _move(
        self, state: FLAMECHEState, slots: Tensor, clients: list[int], server: Server
    ) -> tuple[FLAMECHEState, list[int]]:
        """Takes new assignments of some clients; in a protected sum those of the survivors, where none is exposed."""
        if not self.protected:
            return replace(state, slots=slots), clients
        slots, held = without_exposure(state.known, state.slots, slots, self.n_clusters)
        if held:
            server.note(
                f"round {server.context.round}: clients {held} keep the clusters that they had, or none, as their "
                "metadata would follow from the sums"
            )
        clients = [client for client in clients if client not in held]
        if torch.equal(slots, state.slots):
            return state, clients
        to: dict[int, Message] = {
            client: {
                "counted": state.slots[:, client], "target": slots[:, client], "components": self.n_clusters
            }
            for client in clients
        }  # fmt: skip
        try:
            changes = combinations(state.slots, slots, self.n_clusters)
            total, known = self._sum(server, state, to, changes, state.sums.numel())
        except NoSum as error:
            server.note(f"round {server.context.round}: assignments stay as they were: {error}")
            return replace(state, known=after_refusal(error, state.known, changes)), []
        survivors = list(total.survivors)
        kept = state.slots.clone()
        kept[:, survivors] = slots[:, survivors]
        sums = state.sums + torch.from_numpy(total.total).reshape(state.sums.shape)
        return replace(state, slots=kept, sums=sums, known=known), survivors

    def _sum(
        self, server: Server, state: FLAMECHEState, to: Mapping[int, Message], coefficients: Tensor, length: int
    ) -> tuple[Sum, Tensor]:
        """A protected sum of changes, and what the server knows afterwards."""
        own = {client: {**message, "mixture": self.mixture.name} for client, message in to.items()}
        allowed = survivors_only(state.known, coefficients)
        total = sum_over_clients(server, self.aggregation, own, length, self.sum_bound, "contribute", allowed)
        return total, extended(state.known, only(coefficients, total.survivors))

    def _m_step(self, state: FLAMECHEState) -> FLAMECHEState:
        """Parameters from the sums over all clients seen so far."""
        sums = state.sums if self.protected else self.mixture.sums(state.statistics, state.slots, self.n_clusters)
        members = torch.stack([sizes(row, self.n_clusters) for row in state.slots])
        return replace(state, parameters=self.mixture.parameters(sums, members, state.parameters))

    def _recluster(self, state: FLAMECHEState, present: list[int], server: Server) -> FLAMECHEState:
        if self.recluster_every is None or server.context.round % self.recluster_every:
            return state
        slots = state.slots.clone()
        for start in range(self.n_init):
            generator = server.rng(f"spread {start}")
            changed = spread_slots(state.slots[start], state.errors[start], self.n_clusters, generator)
            if changed is not None:
                slots[start] = changed
        if self.protected:
            away = [client for client in range(slots.shape[1]) if client not in present]
            slots[:, away] = state.slots[:, away]
        if torch.equal(slots, state.slots):
            return state
        before = state
        state, _ = self._move(state, slots, [client for client in present if int(slots[0, client]) >= 0], server)
        return self._m_step(replace(state, models=inherited(before, state.slots[state.best])))

    def _choose(self, state: FLAMECHEState) -> FLAMECHEState:
        """The start with the smallest summed error; models follow their clients if it is another than before."""
        totals = torch.nansum(state.errors, dim=1)
        best = int(totals.argmin())
        clusters = state.slots[best]
        models = state.models
        if best != state.best:
            order = matching(state.slots[state.best], clusters, self.n_clusters)
            models = {name: values[order] for name, values in models.items()}
        return replace(state, best=best, clusters=clusters.clone(), models=models)

    def _figures(self, state: FLAMECHEState) -> Metrics:
        seen = state.clusters >= 0
        metrics: Metrics = {"clients/seen": float(seen.sum())}
        if bool(seen.any()):  # nobody is, as long as protected sums are refused
            metrics["clusters/error"] = float(state.errors[state.best][seen].mean())
        return metrics

    # -- after the run --------------------------------------------------------------------------------------------

    @classmethod
    def assign_client(cls, state: State, module: ClientModule, ctx: ClientContext) -> int:
        """The cluster that the new client's own E-step finds."""
        assert isinstance(state, FLAMECHEState)
        if not state.parameters.numel():
            raise ValueError("there are no centroids yet: run at least one round first")
        module.act("describe_metadata", {"mixture": state.mixture, "reveal": False}, ctx)
        message: Message = {"parameters": state.parameters[state.best][None].float(), "mixture": state.mixture}
        return int(read_tensor(module.act("locate", message, ctx), "slots")[0])

    @classmethod
    def signature_of(cls, state: State, client: int, own: Mapping[str, Value]) -> Message:
        """The client's metadata: "blocks" (C, d), class-wise means, and "counts" (C,)."""
        if "metadata/blocks" not in own:
            raise ValueError(
                f"there are no metadata of client {client!r}: it took part in no round, or keeps them for itself "
                "(protected sums)"
            )
        return {name: read_tensor(own, f"metadata/{name}") for name in ("blocks", "counts")}
