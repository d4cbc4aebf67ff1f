"""What FLAMECHE knows between rounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedclust.algorithms.cluster_models import ClusterModelState, Models


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
        known: (r, N) float64, the combinations of clients' statistics that protected sums told; see
            `fedclust.privacy.exposure`.
        best: The start with the smallest summed error, whose slots are `clusters`.
        mixture: Name of the mixture.
    """

    parameters: Tensor
    slots: Tensor
    errors: Tensor
    statistics: Tensor
    sums: Tensor
    known: Tensor
    best: int
    mixture: str


def require_same(state: FLAMECHEState, n_clusters: int, n_init: int, mixture: str, protected: bool) -> None:
    """Refuses a state that other arguments made.

    Raises:
        ValueError: Naming the argument and both values.
    """
    pairs: dict[str, tuple[object, object]] = {
        "n_clusters": (len(next(iter(state.models.values()))), n_clusters),
        "n_init": (len(state.slots), n_init),
        "mixture": (state.mixture, mixture),
    }
    if state.parameters.numel():
        modes = {True: "a protected mode", False: "plain"}
        pairs["aggregation"] = (modes[bool(state.sums.numel())], modes[protected])
    for name, (before, now) in pairs.items():
        if before != now:
            raise ValueError(f"{name}: the run that is resumed has {before}, this one {now}; go on with the same")


def sizes(slots: Tensor, components: int) -> Tensor:
    """(K,) number of clients in each cluster."""
    return torch.bincount(slots[slots >= 0], minlength=components)


def matching(before: Tensor, after: Tensor, components: int) -> Tensor:
    """(K,) for each new cluster the old one that shares most clients with it, each old one once."""
    seen = (before >= 0) & (after >= 0)
    shared = torch.zeros(components, components).index_put_(
        (after[seen], before[seen]), torch.ones(int(seen.sum())), accumulate=True
    )
    return torch.from_numpy(linear_sum_assignment(shared.numpy(), maximize=True)[1])


def inherited(state: FLAMECHEState, slots: Tensor) -> Models:
    """Models after clients of one cluster moved into empty ones: these start from the model their clients had.

    Args:
        state: Before the move.
        slots: (N,) assignments of the best start after it.
    """
    before = state.slots[state.best]
    models = {name: values.clone() for name, values in state.models.items()}
    moved = slots != before
    for old, new in sorted(set(zip(before[moved].tolist(), slots[moved].tolist(), strict=True))):
        for values in models.values():
            values[new] = values[old]
    return models
