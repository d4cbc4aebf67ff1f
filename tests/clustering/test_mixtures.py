"""Mixtures whose M-step only adds: hand values, missing classes, empty components, re-clustering."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import multinomial, norm
from sklearn.mixture import GaussianMixture

from fedclust.clustering.mixtures import MIXTURES, DiagonalGaussian, Metadata, Multinomial, Spherical, spread_slots


def meta(blocks: list[list[float]], counts: list[int]) -> Metadata:
    return Metadata(torch.tensor(blocks), torch.tensor(counts))


A = meta([[3.0, 4.0], [0.0, 0.0]], [2, 0])  # lacks class 1
B = meta([[1.0, 0.0], [0.0, 2.0]], [1, 3])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_spherical_costs_compare_observed_classes_only() -> None:
    """A has class 0 only: 1 − cos((3, 4), (1, 0)) = .4, whatever the centroid's block of class 1 is."""
    centers = torch.tensor([[[[1.0, 0.0], [9.0, 9.0]], [[0.0, 2.0], [5.0, 1.0]]]], dtype=torch.float64)
    assert Spherical().costs(A, centers).tolist() == [[pytest.approx(0.4), pytest.approx(0.2)]]
    both = torch.tensor([1.0, 0, 0, 2]).double()
    for k, cost in enumerate(Spherical().costs(B, centers)[0].tolist()):
        center = centers[0, k].flatten()
        assert cost == pytest.approx(1 - float(both @ center / both.norm() / center.norm()))


def test_spherical_centroids_are_means_over_the_members_that_have_the_class() -> None:
    kind = Spherical()
    statistics = torch.stack([kind.statistics(A), kind.statistics(B)])
    slots = torch.tensor([[0, 0]])
    sums = kind.sums(statistics, slots, 3)
    before = torch.full((1, 3, 2, 2), 7.0, dtype=torch.float64)
    found = kind.parameters(sums, torch.tensor([[2, 0, 0]]), before)
    assert found[0, 0].tolist() == [[2.0, 2.0], [0.0, 2.0]]
    assert torch.equal(found[0, 1:], before[0, 1:])


def test_a_class_that_no_member_has_keeps_its_block() -> None:
    kind = Spherical()
    sums = kind.sums(kind.statistics(A)[None], torch.tensor([[1]]), 2)
    before = torch.full((1, 2, 2, 2), 7.0, dtype=torch.float64)
    found = kind.parameters(sums, torch.tensor([[0, 1]]), before)
    assert found[0, 1].tolist() == [[3.0, 4.0], [7.0, 7.0]]


@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_sums_are_additive_and_leave_out_clients_never_seen(name: str) -> None:
    kind = MIXTURES[name]
    statistics = torch.stack([kind.statistics(A), kind.statistics(B), kind.statistics(B)])
    slots = torch.tensor([[0, 1, -1], [1, 1, 1]])
    sums = kind.sums(statistics, slots, 2)
    assert torch.equal(sums[0, 0], statistics[0])
    assert torch.equal(sums[0, 1], statistics[1])
    assert torch.equal(sums[1, 1], statistics.sum(0))
    assert not sums[1, 0].any()


def test_spherical_start_is_positive_and_of_length_one() -> None:
    overall = torch.zeros(3, 5, dtype=torch.float64)
    first = Spherical().start(2, 4, overall, 0, generator())
    assert first.shape == (2, 4, 3, 4)
    assert (first >= 0).all()
    assert torch.allclose(first.flatten(2).norm(dim=2), torch.ones(2, 4, dtype=torch.float64))
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, Spherical().start(2, 4, overall, 0, generator()))


def test_gaussian_m_step_and_costs_equal_scikit_learn_and_scipy() -> None:
    kind = DiagonalGaussian()
    values = torch.randn(30, 1, 4, generator=generator())
    clients = [Metadata(value, torch.tensor([5])) for value in values]
    statistics = torch.stack([kind.statistics(client) for client in clients])
    first = kind.start(1, 1, statistics.sum(0), 30, generator())
    sums = kind.sums(statistics, torch.zeros(1, 30, dtype=torch.int64), 1)
    found = kind.parameters(sums, torch.tensor([[30]]), first)[0, 0, 0]
    expected = GaussianMixture(1, covariance_type="diag", reg_covar=0).fit(values[:, 0].numpy())
    assert torch.allclose(found[:4].float(), torch.from_numpy(expected.means_[0]).float(), atol=1e-5)
    assert torch.allclose(found[4:8].float(), torch.from_numpy(expected.covariances_[0]).float(), atol=1e-5)
    cost = float(kind.costs(clients[0], found[None, None, None])[0, 0])
    density = norm.logpdf(values[0, 0], found[:4], found[4:8].sqrt()).mean()
    assert cost == pytest.approx(-density - 0.5 * math.log(2 * math.pi), abs=1e-5)


def test_gaussian_variances_have_a_floor() -> None:
    kind = DiagonalGaussian()
    statistics = torch.stack([kind.statistics(A), kind.statistics(B)])
    first = kind.start(1, 2, statistics.sum(0), 2, generator())
    sums = kind.sums(statistics, torch.tensor([[0, 1]]), 2)
    found = kind.parameters(sums, torch.tensor([[1, 1]]), first)
    assert (found[..., 2:4] > 0).all()
    assert torch.isfinite(kind.costs(B, found)).all()


def test_multinomial_equals_scipy_up_to_the_coefficient() -> None:
    kind = Multinomial()
    client = meta([[0.0], [0.0], [0.0]], [1, 0, 3])
    sums = kind.sums(kind.statistics(client)[None], torch.tensor([[0]]), 1)
    found = kind.parameters(sums, torch.tensor([[1]]), torch.ones(1, 1, 3, 1, dtype=torch.float64) / 3)
    assert found.flatten().tolist() == pytest.approx([1.5 / 5.5, 0.5 / 5.5, 3.5 / 5.5])
    likelihood = multinomial.logpmf([1, 0, 3], 4, found.flatten().numpy()) - math.log(4)
    assert float(kind.costs(client, found)) == pytest.approx(-likelihood / 4)
    first = kind.start(2, 3, sums[0, 0], 1, generator())
    assert torch.allclose(first.sum(2), torch.ones(2, 3, 1, dtype=torch.float64))


def test_the_worst_cluster_is_spread_over_itself_and_the_empty_ones() -> None:
    slots = torch.tensor([0] * 20 + [2] * 20 + [-1])
    errors = torch.tensor([0.1] * 20 + [0.5] * 20 + [math.nan], dtype=torch.float64)
    found = spread_slots(slots, errors, 4, generator())
    assert found is not None
    assert found[:20].tolist() == [0] * 20
    assert set(found[20:40].tolist()) == {1, 2, 3}
    assert int(found[40]) == -1
    assert torch.equal(slots[20:40], torch.full((20,), 2))


@pytest.mark.parametrize("slots", [[0, 1, 1], [-1, -1, -1]])
def test_nothing_is_spread_without_empty_clusters_or_without_clients(slots: list[int]) -> None:
    assert spread_slots(torch.tensor(slots), torch.zeros(3, dtype=torch.float64), 2, generator()) is None
