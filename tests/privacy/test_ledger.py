"""The ledger: who pays for which round, all bounds side by side, the smallest named, the paper's own parameters."""

from __future__ import annotations

import math

import pytest
import torch

from fedclust.privacy.amplification import shuffle_amplification
from fedclust.privacy.ledger import Ledger, compose_coordinates, zcdp_epsilon

PAPER_D2 = 580_571
QUARTETS = [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(5)]


def test_no_round_costs_nothing() -> None:
    ledger = Ledger()
    assert ledger.metrics() == {"privacy/epsilon_round": 0, "privacy/epsilon_total": 0, "privacy/delta": 0}
    statement = ledger.total_statement(3)
    assert [(b.epsilon, b.delta) for b in statement.bounds] == [(0, 0)] * 4
    assert (statement.rounds, statement.of_rounds, statement.epsilon, statement.delta) == (0, 0, 0, 0)
    assert (ledger.n_rounds, ledger.users) == (0, [])


def test_one_round_by_hand() -> None:
    ledger = Ledger(delta=1e-5)
    ledger.record([list(range(1000))], d2=16, eps0=0.5, clip=3.0)
    statement = ledger.round_statement(0)
    delta_s = 0.5e-5 / 16
    eps_s = shuffle_amplification(0.5, 1000, delta_s)
    theorem = statement.bound("theorem_2")
    assert theorem.epsilon == pytest.approx(compose_coordinates(eps_s, delta_s, 16, 0.5e-5).epsilon, rel=1e-12)
    assert theorem.delta == pytest.approx(1e-5, rel=1e-12)
    assert statement.bound("pure").epsilon == 2.0
    assert statement.bound("pure").delta == 0
    assert statement.bound("zcdp").epsilon == pytest.approx(0.125 + 2 * math.sqrt(0.125 * math.log(1e5)), rel=1e-12)
    assert statement.bound("zcdp_tight").epsilon < statement.bound("zcdp").epsilon
    assert statement.smallest is min(statement.bounds, key=lambda b: b.epsilon)
    assert statement == ledger.total_statement(0)
    with pytest.raises(ValueError, match="theorem_2, pure, zcdp, zcdp_tight, got 'best'"):
        statement.bound("best")


def test_each_bound_wins_somewhere() -> None:
    winners = {}
    for name, users, d2, eps0 in (
        ("pure", 2, 2, 0.1),
        ("zcdp_tight", 4, 10_000, 1.0),
        ("theorem_2", 100_000, 4, 1.0),
    ):
        ledger = Ledger()
        ledger.record([range(users)], d2, eps0, 1.0)
        winners[name] = ledger.worst_round().smallest
        assert winners[name].name == name
    assert winners["pure"].against == winners["zcdp_tight"].against != winners["theorem_2"].against
    assert "management server" in winners["pure"].against


def test_rounds_add_up_as_each_bound_says() -> None:
    ledger = Ledger()
    for _ in range(100):
        ledger.record([[0, 1], [2, 3, 4]], d2=100, eps0=1.0, clip=0.2)
    statement = ledger.total_statement(4)
    assert statement.bound("pure").epsilon == pytest.approx(1000)
    assert statement.bound("zcdp").epsilon == pytest.approx(50 + 2 * math.sqrt(50 * math.log(1e5)), rel=1e-12)
    assert statement.bound("zcdp").epsilon == pytest.approx(98, abs=0.05)
    delta_s = 0.5e-5 / (100 * 100)
    eps_s = shuffle_amplification(1.0, 3, delta_s)
    wanted = compose_coordinates(eps_s, delta_s, 100, 0.5e-5, rounds=100)
    assert statement.bound("theorem_2").epsilon == pytest.approx(wanted.epsilon, rel=1e-12)
    assert statement.bound("theorem_2").delta == pytest.approx(1e-5, rel=1e-9)
    assert "100 rounds" in statement.bound("zcdp").composition
    assert "in 100 rounds" in statement.bound("theorem_2").composition
    assert statement.epsilon > ledger.round_statement(4).epsilon


def test_a_round_without_a_user_costs_that_user_nothing() -> None:
    ledger = Ledger()
    ledger.record([[0, 1, 2]], d2=50, eps0=1.0, clip=1.0)
    ledger.record([[0, 2]], d2=50, eps0=1.0, clip=1.0)
    ledger.record([[2, 7]], d2=50, eps0=1.0, clip=1.0)
    assert ledger.users == [0, 1, 2, 7]
    assert [ledger.total_statement(user).rounds for user in (0, 1, 2, 7, 9)] == [2, 1, 3, 1, 0]
    rho = [ledger.total_statement(user).bound("zcdp").epsilon for user in (9, 1, 0, 2)]
    assert rho == [0.0, *(zcdp_epsilon(0.5 * rounds, 1e-5) for rounds in (1, 2, 3))]
    assert ledger.round_statement(1).epsilon == 0
    assert ledger.round_statement(1, 0).epsilon > 0
    assert ledger.round_statement(1, -3) == ledger.round_statement(1, 0)
    assert (ledger.worst_total().user, ledger.worst_total().rounds, ledger.worst_total().of_rounds) == (2, 3, 3)
    assert ledger.worst_round(0).user == 0


def test_the_worst_user_of_a_round_is_in_the_smallest_cluster() -> None:
    ledger = Ledger()
    ledger.record([range(10_000), [20_000, 20_001]], d2=4, eps0=1.0, clip=1.0)
    assert ledger.worst_round().user == 20_000
    assert ledger.round_statement(0).epsilon < ledger.worst_round().epsilon
    metrics = ledger.metrics()
    assert metrics["privacy/epsilon_round"] == metrics["privacy/epsilon_total"] == ledger.worst_round().epsilon


def test_settings_may_change_between_rounds() -> None:
    ledger = Ledger()
    ledger.record([[0, 1]], d2=100, eps0=1.0, clip=1.0)
    ledger.record([[0, 1]], d2=25, eps0=2.0, clip=9.0)
    statement = ledger.total_statement(0)
    assert statement.bound("pure").epsilon == pytest.approx(10 + 10)
    assert statement.bound("zcdp").epsilon == pytest.approx(zcdp_epsilon(0.5 + 2.0, 1e-5))


def test_alone_in_a_cluster_no_amplification_is_claimed() -> None:
    ledger = Ledger()
    ledger.record([[5]], d2=100, eps0=0.5, clip=1.0)
    bound = ledger.round_statement(5).bound("theorem_2")
    assert bound.epsilon == pytest.approx(compose_coordinates(0.5, 0.0, 100, 0.5e-5).epsilon, rel=1e-12)
    assert bound.delta == 0.5e-5


def test_nothing_sent_costs_nothing() -> None:
    ledger = Ledger()
    ledger.record([[0, 1]], d2=0, eps0=1.0, clip=1.0)
    assert [b.epsilon for b in ledger.round_statement(0).bounds] == [0, 0, 0, 0]


def test_the_papers_own_parameters() -> None:
    # docs/privacy.md quotes these figures.
    eps_s = shuffle_amplification(1.0, 4, 1e-5)
    theorem = compose_coordinates(eps_s, 1e-5, PAPER_D2, 1e-5)
    assert theorem.epsilon == pytest.approx(272_000, rel=1e-3)
    assert theorem.delta == pytest.approx(5.81, abs=0.005)
    assert theorem.vacuous
    ledger = Ledger(delta=1e-5, coordinate_delta=1e-5)
    for _ in range(100):
        ledger.record(QUARTETS, PAPER_D2, 1.0, 0.4)
    for statement, zcdp, tight, pure in (
        (ledger.worst_round(), 5.30, 4.73, 762),
        (ledger.worst_total(), 98.0, 96.0, 76_195),
    ):
        assert statement.bound("theorem_2").vacuous
        assert "theorem_2: refused" in str(statement)
        assert statement.smallest.name == "zcdp_tight"
        assert statement.bound("zcdp").epsilon == pytest.approx(zcdp, rel=1e-3)
        assert statement.bound("zcdp_tight").epsilon == pytest.approx(tight, rel=1e-3)
        assert statement.bound("pure").epsilon == pytest.approx(pure, rel=1e-3)
    # With δ shared out over the coordinates the statement has a meaning, and is no better.
    shared = Ledger(delta=1e-5)
    shared.record(QUARTETS, PAPER_D2, 1.0, 0.4)
    assert shared.worst_round().bound("theorem_2").delta == pytest.approx(1e-5, rel=1e-9)
    assert shared.worst_round().bound("theorem_2").epsilon == pytest.approx(272_000, rel=1e-3)
    for _ in range(99):
        shared.record(QUARTETS, PAPER_D2, 1.0, 0.4)
    assert shared.worst_total().bound("theorem_2").epsilon == pytest.approx(26.9e6, rel=2e-3)


def test_the_noise_at_the_papers_size() -> None:
    # Norm of d₂ Laplace values of scale 2Φ: √(2·d₂)·2Φ.
    assert math.sqrt(2 * PAPER_D2) * 2 == pytest.approx(2155, abs=0.5)


def test_a_statement_says_what_it_is_about() -> None:
    ledger = Ledger()
    ledger.record([[0, 1]], d2=9, eps0=0.1, clip=1.0)
    text = str(ledger.round_statement(1))
    assert text.startswith("user 1, 1 of 1 round: smallest bound pure: ε = 0.3 at δ = 0 [")
    for word in ("theorem_2", "zcdp", "zcdp_tight", "covered: all less important", "no differential privacy at all"):
        assert word in text


def test_state_and_back() -> None:
    ledger = Ledger()
    ledger.record([[0, 1, 2], [5, 9]], d2=50, eps0=1.0, clip=0.3)
    ledger.record([[2, 5]], d2=51, eps0=0.7, clip=0.1)
    state = ledger.state()
    assert state["rounds"].tolist() == [[50, 1.0, 0.3], [51, 0.7, 0.1]]
    resumed = Ledger()
    resumed.record([[77]], d2=1, eps0=1.0, clip=1.0)
    resumed.load_state(state)
    for one in (ledger, resumed):
        one.record([[0, 9]], d2=50, eps0=1.0, clip=0.3)
    assert resumed.metrics() == ledger.metrics()
    assert [resumed.total_statement(u) for u in range(10)] == [ledger.total_statement(u) for u in range(10)]
    assert resumed.users == ledger.users
    empty = Ledger()
    empty.load_state(Ledger().state())
    assert empty.n_rounds == 0


def test_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="lacks users"):
        Ledger().load_state({"rounds": torch.zeros(0, 3)})
    with pytest.raises(ValueError, match="round 1 of 1 rounds"):
        Ledger().load_state({"rounds": torch.tensor([[5.0, 1.0, 1.0]]), "users": torch.tensor([[1, 0, 2]])})


@pytest.mark.parametrize("delta", [0.0, 1.0, 5.8, -1.0, float("nan")])
def test_deltas_without_meaning_are_refused(delta: float) -> None:
    with pytest.raises(ValueError, match="delta must be"):
        Ledger(delta)
    with pytest.raises(ValueError, match="coordinate_delta must be"):
        Ledger(coordinate_delta=delta)


def test_rounds_that_make_no_sense_are_refused_and_not_recorded() -> None:
    ledger = Ledger()
    for clusters, d2, eps0, clip, message in (
        ([[0, 1], [1]], 5, 1.0, 1.0, "user 1 appears twice"),
        ([[0, 0]], 5, 1.0, 1.0, "user 0 appears twice"),
        ([], 5, 1.0, 1.0, "round 0 has no users"),
        ([[]], 5, 1.0, 1.0, "round 0 has no users"),
        ([[-1]], 5, 1.0, 1.0, "user must be"),
        ([[0]], -5, 1.0, 1.0, "d2 must be"),
        ([[0]], 5, 0.0, 1.0, "epsilon must be above 0"),
        ([[0]], 5, 1.0, 0.0, "clipping bound must be above 0"),
        ([[0]], 5, 1e300, 1.0, "epsilon must be at most"),
    ):
        with pytest.raises(ValueError, match=message):
            ledger.record(clusters, d2, eps0, clip)
    assert ledger.n_rounds == 0
    for call in (ledger.worst_total, ledger.worst_round, lambda: ledger.round_statement(0)):
        with pytest.raises(ValueError, match=r"before the first round|0 recorded rounds"):
            call()
