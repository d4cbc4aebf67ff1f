"""FLAMECHE: clients grouped during training by expectation-maximisation over metadata, with additions only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedclust.algorithms.cluster_models import ClusterModelAlgorithm, ClusterModelState, Models, repeated
from fedclust.algorithms.groups import group_metrics
from fedclust.algorithms.summing import sum_over_clients
from fedclust.checks import choice, positive, positive_int
from fedclust.clustering.mixtures import MIXTURES, Mixture, spread_slots
from fedclust.federation.algorithm import Metrics, Server, State
from fedclust.federation.client import ClientModule
from fedclust.federation.context import ClientContext
from fedclust.federation.message import Message, Value, read_tensor
from fedclust.privacy.aggregation import Sum, TooFewClients
from fedclust.privacy.sums import MODES, make_aggregation


@dataclass
class FLAMECHEState(ClusterModelState):
    """Models, groups, and the EM of every start.

    Shapes: S starts, K clusters, N clients, C classes.

    Attributes:
        parameters: (S, K, C, p) float64, Θ; empty before the first round.
        slots: (S, N) int64 latest assignment of each client; −1 for a client never seen.
        errors: (S, N) float64 latest error; NaN for a client never seen.
        statistics: (N, C, s) float64, what each seen client uploaded, once; empty where sums are protected.
        sums: (S, K, C, s) float64, all that the server knows of the statistics where sums are protected; else empty.
        best: The start with the smallest summed error, whose slots are `clusters`.
        mixture: Name of the mixture.
    """

    parameters: Tensor
    slots: Tensor
    errors: Tensor
    statistics: Tensor
    sums: Tensor
    best: int
    mixture: str


class FLAMECHE(ClusterModelAlgorithm):
    """Alternates one E-step on the clients and one M-step on the server per round, beside training a model per cluster.

    Metadata are class-wise means of a client's features under a random network that all clients draw from one seed. A
    client compares them with the centroids itself; the server only adds.

    Args:
        n_clusters: K.
        round_epochs: Local epochs per round; 0 groups clients without training.
        mixture: "spherical" is the paper's spherical k-means; "gaussian" and "multinomial" are of its family [ours].
        n_init: Starts that run side by side in the same messages; the one with the smallest summed error counts [ours].
            1 is the paper.
        recluster_every: τ: every so many rounds empty clusters are filled from the one with the highest mean error;
            None never.
        aggregation: "plain": the server gets each client's statistics, once. "secure_sum" and "ckks": it gets sums of
            changes only, from the clients of a round; re-clustering then moves clients of the round only, and
            assignments and errors, which the server needs, stay visible. See `fedclust.privacy.sums`.
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
        n_init: int = 5,
        recluster_every: int | None = 2,
        aggregation: Literal["plain", "secure_sum", "ckks"] = "plain",
        sum_bound: float = 1000.0,
    ) -> None:
        super().__init__(round_epochs)
        self.n_clusters = positive_int("n_clusters", n_clusters)
        self.mixture: Mixture = MIXTURES[choice("mixture", mixture, tuple(MIXTURES))]
        self.n_init = positive_int("n_init", n_init)
        self.recluster_every = None if recluster_every is None else positive_int("recluster_every", recluster_every)
        self.aggregation = make_aggregation(choice("aggregation", aggregation, MODES))
        self.protected = aggregation != "plain"
        self.sum_bound = positive("sum_bound", sum_bound)

    def check(self, server: Server) -> None:
        """Refuses more clusters than clients."""
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
            best=0,
            mixture=self.mixture.name,
        )

    def round(self, state: State, cohort: list[int], server: Server) -> tuple[FLAMECHEState, Metrics]:
        """E-step, M-step, perhaps re-clustering, and local epochs with the clusters' models."""
        assert isinstance(state, FLAMECHEState)
        with server.stage("cluster"):
            state, present = self._describe(state, cohort, server)
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
        replies = server.ask("describe_metadata", new, shared=shared)
        if self.protected:
            state = self._first_sums(state, replies, server)
        else:
            state = self._with_statistics(state, replies, server)
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
            nowhere, first = torch.tensor([-1]), torch.tensor([0])
            to: dict[int, Message] = {client: {"counted": nowhere, "target": first} for client in replies}
            total = self._sum(server, to, overall.numel(), components=1)
            overall, count = torch.from_numpy(total.total).reshape(shape), total.count
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
        """Takes new assignments of some clients; in a protected sum those of the survivors only."""
        if not self.protected:
            return replace(state, slots=slots), clients
        to: dict[int, Message] = {
            client: {"counted": state.slots[:, client], "target": slots[:, client]} for client in clients
        }
        try:
            total = self._sum(server, to, state.sums.numel(), components=self.n_clusters)
        except TooFewClients as error:
            server.note(f"round {server.context.round}: assignments stay as they were: {error}")
            return state, []
        survivors = list(total.survivors)
        kept = state.slots.clone()
        kept[:, survivors] = slots[:, survivors]
        sums = state.sums + torch.from_numpy(total.total).reshape(state.sums.shape)
        return replace(state, slots=kept, sums=sums), survivors

    def _sum(self, server: Server, to: Mapping[int, Message], length: int, components: int) -> Sum:
        own = {
            client: {**message, "components": components, "mixture": self.mixture.name}
            for client, message in to.items()
        }
        return sum_over_clients(server, self.aggregation, own, length, self.sum_bound, "contribute")

    def _m_step(self, state: FLAMECHEState) -> FLAMECHEState:
        """Parameters from the sums over all clients seen so far."""
        sums = state.sums if self.protected else self.mixture.sums(state.statistics, state.slots, self.n_clusters)
        members = torch.stack([_counts(row, self.n_clusters) for row in state.slots])
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
        return self._m_step(replace(state, models=self._inherited(before, state.slots[state.best])))

    def _inherited(self, state: FLAMECHEState, slots: Tensor) -> Models:
        """Models after clients of one cluster moved into empty ones: these start from the model their clients had."""
        before = state.slots[state.best]
        models = {name: values.clone() for name, values in state.models.items()}
        moved = slots != before
        for old, new in sorted(set(zip(before[moved].tolist(), slots[moved].tolist(), strict=True))):
            for values in models.values():
                values[new] = values[old]
        return models

    def _choose(self, state: FLAMECHEState) -> FLAMECHEState:
        """The start with the smallest summed error; models follow their clients if it is another than before."""
        totals = torch.nansum(state.errors, dim=1)
        best = int(totals.argmin())
        clusters = state.slots[best]
        models = state.models
        if best != state.best:
            order = _matching(state.slots[state.best], clusters, self.n_clusters)
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
            raise ValueError(f"client {client!r} has not described its rows: it took part in no round")
        return {name: read_tensor(own, f"metadata/{name}") for name in ("blocks", "counts")}


def _counts(slots: Tensor, components: int) -> Tensor:
    return torch.bincount(slots[slots >= 0], minlength=components)


def _matching(before: Tensor, after: Tensor, components: int) -> Tensor:
    """(K,) for each new cluster the old one that shares most clients with it, each old one once."""
    seen = (before >= 0) & (after >= 0)
    shared = torch.zeros(components, components).index_put_(
        (after[seen], before[seen]), torch.ones(int(seen.sum())), accumulate=True
    )
    return torch.from_numpy(linear_sum_assignment(shared.numpy(), maximize=True)[1])
