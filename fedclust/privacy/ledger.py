"""The privacy ledger: what the users' noisy coordinates have revealed so far, by several bounds, the smallest named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedclust.checks import positive_int
from fedclust.privacy.amplification import shuffle_amplification
from fedclust.privacy.composition import (
    LOCAL,
    Bound,
    compose_coordinates,
    compose_mixed,
    probability,
    pure_epsilon,
    rounds_text,
    zcdp_epsilon,
    zcdp_rho,
)
from fedclust.privacy.laplace import coordinate_scale

__all__ = ["COVERED", "NOT_COVERED", "Bound", "Ledger", "Statement", "compose_coordinates", "zcdp_epsilon"]

COVERED = (
    "all less important coordinates of one user's gradient together, given the ranking, the clipping bound and "
    "whatever was published before"
)
NOT_COVERED = (
    "the permutation sequence, the norm of the less important part, the values of the important coordinates, the "
    "sizes, the clusters, BatchNorm buffers, the training loss, and the counts of the evaluations: no differential "
    "privacy at all for them"
)

# (users in the shuffle, coordinates, ε₀)
_Kind = tuple[int, int, float]


@dataclass(frozen=True)
class Statement:
    """What one user has revealed.

    Attributes:
        user: Id.
        rounds: Rounds that the user took part in, of those that the statement is about.
        of_rounds: Rounds that the statement is about.
        bounds: Theorem 2, pure ε, zCDP, and zCDP with the tighter conversion. All hold at once.
        covered: What the bounds speak of.
        not_covered: What they do not speak of.
    """

    user: int
    rounds: int
    of_rounds: int
    bounds: tuple[Bound, ...]
    covered: str = COVERED
    not_covered: str = NOT_COVERED

    @property
    def smallest(self) -> Bound:
        """The bound with the smallest ε among those with δ < 1."""
        return min((b for b in self.bounds if not b.vacuous), key=lambda b: (b.epsilon, b.delta))

    @property
    def epsilon(self) -> float:
        """ε of the smallest bound."""
        return self.smallest.epsilon

    @property
    def delta(self) -> float:
        """δ of the smallest bound."""
        return self.smallest.delta

    def bound(self, name: str) -> Bound:
        """The bound of that name.

        Raises:
            ValueError: if there is none.
        """
        for bound in self.bounds:
            if bound.name == name:
                return bound
        raise ValueError(f"bound must be one of {', '.join(b.name for b in self.bounds)}, got {name!r}")

    def __str__(self) -> str:
        head = f"user {self.user}, {self.rounds} of {rounds_text(self.of_rounds)}: smallest bound {self.smallest}"
        rest = [f"  {bound}" for bound in self.bounds]
        return "\n".join([head, *rest, f"  covered: {self.covered}", f"  not covered: {self.not_covered}"])


@dataclass(frozen=True)
class _Round:
    d2: int
    eps0: float
    clip: float
    sizes: dict[int, int]


class Ledger:
    """Counts what every user spends, round by round. A round without a user costs that user nothing.

    Args:
        delta: δ of every statement. Theorem 2 spends half of it as δ' and deals the other half to the shuffled
            coordinates of all the rounds that the statement is about.
        coordinate_delta: δ_s of one shuffled coordinate in place of that half, as in the paper; δ' is then ``delta``,
            and the δ of the statement grows with coordinates and rounds until, at 1, the bound is refused.

    Raises:
        ValueError: for a δ that does not lie above 0 and below 1.
    """

    def __init__(self, delta: float = 1e-5, coordinate_delta: float | None = None) -> None:
        self.delta = probability("delta", delta)
        self.coordinate_delta = None if coordinate_delta is None else probability("coordinate_delta", coordinate_delta)
        self._rounds: list[_Round] = []
        self._spent: dict[int, Counter[_Kind]] = {}

    @property
    def n_rounds(self) -> int:
        """Recorded rounds."""
        return len(self._rounds)

    @property
    def users(self) -> list[int]:
        """Ids of the users that took part in any round, ascending."""
        return sorted(self._spent)

    def record(self, clusters: Iterable[Iterable[int]], d2: int, eps0: float, clip: float) -> None:
        """Add a round.

        Args:
            clusters: Ids of the users that were shuffled together, one list per cluster.
            d2: Less important coordinates of each user; 0 costs nothing, for nothing was sent.
            eps0: ε₀ of one coordinate.
            clip: Φ; ε does not depend on it, as the noise grows with it.

        Raises:
            ValueError: for a user in two places, an empty round or values out of range.
        """
        sizes: dict[int, int] = {}
        for cluster in clusters:
            members = [positive_int("user", user, least=0) for user in cluster]
            for user in members:
                if user in sizes:
                    raise ValueError(f"user {user} appears twice in the clusters of round {self.n_rounds}")
                sizes[user] = len(members)
        if not sizes:
            raise ValueError(f"round {self.n_rounds} has no users")
        coordinate_scale(clip, eps0)
        self._add(_Round(positive_int("d2", d2, least=0), float(eps0), float(clip), sizes))

    def round_statement(self, user: int, round: int = -1) -> Statement:
        """What ``user`` revealed in one round, the last one by default; nothing if the user was not there.

        Raises:
            ValueError: if there is no such round.
        """
        entry = self._round(round)
        return self._statement(user, self._kinds_of(entry, user), 1)

    def total_statement(self, user: int) -> Statement:
        """What ``user`` revealed in all rounds so far; nothing without rounds."""
        return self._statement(user, self._spent.get(user, Counter()), self.n_rounds)

    def worst_round(self, round: int = -1) -> Statement:
        """The statement of the user who revealed most in one round; the lowest id among equals.

        Raises:
            ValueError: if there is no such round.
        """
        entry = self._round(round)
        return self._worst(sorted(entry.sizes), lambda user: self._kinds_of(entry, user), 1)

    def worst_total(self) -> Statement:
        """The statement of the user who revealed most so far; the lowest id among equals.

        Raises:
            ValueError: before the first round.
        """
        if not self._rounds:
            raise ValueError("there is no worst user before the first round")
        return self._worst(self.users, lambda user: self._spent[user], self.n_rounds)

    def metrics(self) -> dict[str, float]:
        """``privacy/epsilon_round``, ``privacy/epsilon_total`` (the worst users' smallest ε) and ``privacy/delta``.

        All 0 before the first round.
        """
        if not self._rounds:
            return {"privacy/epsilon_round": 0.0, "privacy/epsilon_total": 0.0, "privacy/delta": 0.0}
        last, total = self.worst_round(), self.worst_total()
        return {
            "privacy/epsilon_round": last.epsilon,
            "privacy/epsilon_total": total.epsilon,
            "privacy/delta": max(last.delta, total.delta),
        }

    def state(self) -> dict[str, Tensor]:
        """All that was recorded, as tensors for a checkpoint: rounds (T, 3) float64 and users (rows, 3) int64."""
        rounds = [(r.d2, r.eps0, r.clip) for r in self._rounds]
        users = [(t, user, n) for t, r in enumerate(self._rounds) for user, n in r.sizes.items()]
        return {
            "rounds": torch.tensor(rounds, dtype=torch.float64).reshape(-1, 3),
            "users": torch.tensor(users, dtype=torch.int64).reshape(-1, 3),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace what was recorded by a former :meth:`state`.

        Raises:
            ValueError: if the tensors are missing or do not fit together.
        """
        missing = {"rounds", "users"} - state.keys()
        if missing:
            raise ValueError(f"the state of a ledger lacks {', '.join(sorted(missing))}")
        rounds = [
            _Round(int(d2), float(eps0), float(clip), {}) for d2, eps0, clip in state["rounds"].reshape(-1, 3).tolist()
        ]
        for t, user, n in state["users"].reshape(-1, 3).tolist():
            if not 0 <= t < len(rounds):
                raise ValueError(f"the state of a ledger has users in round {t} of {len(rounds)} rounds")
            rounds[t].sizes[user] = n
        self._rounds, self._spent = [], {}
        for entry in rounds:
            self._add(entry)

    def _add(self, entry: _Round) -> None:
        self._rounds.append(entry)
        for user in entry.sizes:
            self._spent.setdefault(user, Counter()).update(self._kinds_of(entry, user))

    def _round(self, round: int) -> _Round:
        if not -self.n_rounds <= round < self.n_rounds:
            raise ValueError(f"round must be one of the {self.n_rounds} recorded rounds, got {round}")
        return self._rounds[round]

    @staticmethod
    def _kinds_of(entry: _Round, user: int) -> Counter[_Kind]:
        return Counter({(entry.sizes[user], entry.d2, entry.eps0): 1} if user in entry.sizes else {})

    def _worst(self, users: list[int], kinds: Callable[[int], Counter[_Kind]], of_rounds: int) -> Statement:
        # Users with equal histories, usually most of them, are looked at once.
        distinct: dict[frozenset[tuple[_Kind, int]], int] = {}
        for user in users:
            distinct.setdefault(frozenset(kinds(user).items()), user)
        statements = [self._statement(user, kinds(user), of_rounds) for user in distinct.values()]
        return max(statements, key=lambda s: (s.epsilon, -s.user))

    def _statement(self, user: int, kinds: Counter[_Kind], of_rounds: int) -> Statement:
        rounds = sum(kinds.values())
        pure = sum(times * pure_epsilon(d2, eps0) for (_, d2, eps0), times in kinds.items())
        rho = sum(times * zcdp_rho(d2, eps0) for (_, d2, eps0), times in kinds.items())
        added = f"{rounds_text(rounds)} added up"
        label = f"ρ-zCDP over all coordinates, {added}, ρ = {rho:.6g}"
        delta = self.delta if rho > 0 else 0.0
        bounds = (
            self._shuffled(kinds, rounds),
            Bound("pure", pure, 0.0, f"L1 distance of clipped vectors, {added}", LOCAL),
            Bound("zcdp", zcdp_epsilon(rho, self.delta), delta, f"{label}, closed form", LOCAL),
            Bound("zcdp_tight", zcdp_epsilon(rho, self.delta, tight=True), delta, f"{label}, Rényi conversion", LOCAL),
        )
        return Statement(user, rounds, of_rounds, bounds)

    def _shuffled(self, kinds: Counter[_Kind], rounds: int) -> Bound:
        shuffled = sum(times * d2 for (n, d2, _), times in kinds.items() if n > 1)
        if self.coordinate_delta is not None:
            delta_prime, delta_s = self.delta, self.coordinate_delta
        else:
            delta_prime, delta_s = self.delta / 2, self.delta / 2 / max(shuffled, 1)
        parts = [
            (shuffle_amplification(eps0, n, delta_s), delta_s if n > 1 else 0.0, times * d2)
            for (n, d2, eps0), times in sorted(kinds.items())
        ]
        return compose_mixed(parts, delta_prime, rounds)
