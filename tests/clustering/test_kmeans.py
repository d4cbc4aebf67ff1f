"""k-means on the CPU and in PyTorch: one contract, equal results, no silent degenerate outcome."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from fedclust.clustering.kmeans import KMeansResult, assign, kmeans, squared_distances, torch_kmeans
from fedclust.random import numpy_generator

Fit = Callable[..., KMeansResult]
both = pytest.mark.parametrize("fit", [kmeans, torch_kmeans])


@pytest.fixture(autouse=True)
def _no_warning_escapes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def blobs(per_blob: int = 40, d: int = 3, seed: int = 0, apart: float = 8.0) -> torch.Tensor:
    rng = numpy_generator(seed, "blobs")
    middle = rng.normal(size=(4, d)) * apart
    return torch.from_numpy(np.concatenate([rng.normal(c, 1.0, (per_blob, d)) for c in middle])).float()


def uniform(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(numpy_generator(seed, "uniform").normal(size=(n, d))).float()


@pytest.mark.parametrize(("n", "d", "k"), [(160, 3, 4), (60, 1, 5), (25, 2, 25), (30, 4, 1), (200, 16, 10)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_torch_equals_scikit_learn_from_the_same_start(n: int, d: int, k: int, seed: int) -> None:
    x = uniform(n, d, seed)
    start = x[torch.from_numpy(numpy_generator(seed, "start").permutation(n)[:k])]
    ours, theirs = torch_kmeans(x, k, init=start), kmeans(x, k, init=start)
    reference = KMeans(k, init=start.double().numpy(), n_init=1).fit(x.double().numpy())
    for result in (ours, theirs):
        assert torch.equal(result.labels, torch.from_numpy(reference.labels_).long())
        assert np.allclose(result.centers, reference.cluster_centers_, atol=1e-5)
        assert result.inertia == pytest.approx(reference.inertia_, rel=1e-5, abs=1e-9)
        assert result.n_iter == reference.n_iter_
        assert result.n_populated == k
        assert result.populated.all()


def test_torch_equals_scikit_learn_where_a_cluster_runs_empty() -> None:
    x = blobs(20, d=2)
    start = torch.cat([x[[0, 20, 40]], torch.full((1, 2), 1e3)])  # the last centre is nearest to no row
    ours, theirs = torch_kmeans(x, 4, init=start), kmeans(x, 4, init=start)
    assert theirs.n_populated == ours.n_populated == 4
    assert torch.equal(ours.labels, theirs.labels)
    assert torch.allclose(ours.centers, theirs.centers, atol=1e-5)


@both
def test_finds_separated_blobs_whatever_the_seed(fit: Fit) -> None:
    x = blobs(apart=20.0)
    truth = torch.arange(4).repeat_interleave(40)
    for seed in (0, 7, 2**62):
        result = fit(x, 4, seed=seed)
        for blob in range(4):
            assert len(result.labels[truth == blob].unique()) == 1
        assert result.n_populated == 4


@both
def test_own_starts_reach_the_inertia_of_scikit_learn(fit: Fit) -> None:
    x = uniform(150, 4, 5)
    reference = min(KMeans(6, n_init=10, random_state=s).fit(x.double().numpy()).inertia_ for s in range(3))
    assert fit(x, 6, seed=0).inertia <= 1.03 * reference


@both
def test_same_seed_same_bits_other_seed_other_start(fit: Fit) -> None:
    x = uniform(120, 3, 3)
    runs = [fit(x, 8, seed=seed, n_init=1) for seed in (0, 0, 1, 2, 3)]
    assert torch.equal(runs[0].centers, runs[1].centers)
    assert torch.equal(runs[0].labels, runs[1].labels)
    assert len({run.centers.numpy().tobytes() for run in runs}) > 2


def test_bits_do_not_depend_on_the_threads_around_it() -> None:
    x = uniform(3000, 8, 1)
    results = []
    for threads in (1, 2):
        with threadpool_limits(threads):
            results.append(kmeans(x, 7, seed=0, n_init=2))
    assert torch.equal(results[0].centers, results[1].centers)
    assert results[0].inertia == results[1].inertia


@both
def test_fewer_distinct_rows_than_clusters_is_reported(fit: Fit) -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0]]).repeat(5, 1)
    result = fit(x, 4, seed=0)
    assert result.n_populated == 2
    assert result.status == "2 of 4 clusters populated"
    assert int(result.populated.sum()) == 2
    assert torch.isfinite(result.centers).all()
    live = result.centers[result.populated]
    assert sorted(live.tolist()) == [[0.0, 0.0], [1.0, 1.0]]  # populated centres never repeat each other
    assert result.inertia == 0


@both
def test_server_with_three_distinct_centres_among_fifty(fit: Fit) -> None:
    distinct = uniform(3, 4, 9)
    stacked = distinct[torch.arange(50) % 3]
    result = fit(stacked, 10, seed=0)
    assert result.n_populated == 3
    assert len(result.centers[result.populated].unique(dim=0)) == 3
    assert torch.isfinite(result.centers).all()


@both
def test_an_empty_cluster_that_has_no_row_to_take_keeps_its_centre(fit: Fit) -> None:
    x = torch.tensor([[0.0, 0.0], [4.0, 0.0]]).repeat_interleave(5, dim=0)
    start = torch.tensor([[0.1, 0.0], [9.0, 9.0], [4.1, 0.0]])
    result = fit(x, 3, init=start)
    assert result.populated.tolist() == [True, False, True]
    assert result.centers[1].tolist() == [9.0, 9.0]
    assert torch.allclose(result.centers[[0, 2]], torch.tensor([[0.0, 0.0], [4.0, 0.0]]), atol=1e-6)


@both
def test_an_empty_cluster_takes_the_row_farthest_from_its_centre(fit: Fit) -> None:
    x = torch.tensor([[0.0], [0.2], [10.0], [10.2], [13.0]])
    result = fit(x, 3, init=torch.tensor([[0.1], [10.1], [500.0]]))
    assert result.labels.tolist() == [0, 0, 1, 1, 2]
    assert result.centers[:, 0].tolist() == pytest.approx([0.1, 10.1, 13.0])


@both
@pytest.mark.parametrize("seed", range(5))
def test_heavy_duplicates_end_within_the_cap(fit: Fit, seed: int) -> None:
    x = torch.cat([torch.full((20, 3), 20.0), uniform(5, 3, seed)])
    result = fit(x, 8, seed=seed)
    assert result.n_iter <= 300
    assert torch.isfinite(result.centers).all()
    assert result.n_populated == 6  # six distinct rows


@both
def test_iteration_cap_holds(fit: Fit) -> None:
    x = uniform(500, 2, 0)
    assert fit(x, 20, n_init=1, max_iter=2, tol=0.0).n_iter == 2


@both
@pytest.mark.parametrize("max_iter", [1, 2, 300])
def test_labels_name_the_nearest_returned_centre(fit: Fit, max_iter: int) -> None:
    x = uniform(200, 3, 4)
    result = fit(x, 9, n_init=1, max_iter=max_iter)
    assert torch.equal(result.labels, assign(x, result.centers))
    assert torch.equal(torch.bincount(result.labels, minlength=9) > 0, result.populated)


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rows_are_refused_by_number(fit: Fit, bad: float) -> None:
    x = torch.full((25, 3), 20.0)
    x[3, 1] = x[7, 0] = bad
    with pytest.raises(ValueError, match="client 4: 2 of 25 rows of x hold NaN or infinite"):
        fit(x, 2, who="client 4")
    with pytest.raises(ValueError, match="of init hold NaN"):
        fit(torch.ones(5, 1), 2, init=torch.tensor([[bad], [0.0]]))


@both
def test_fewer_rows_than_clusters_names_both(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"client 7: .*2 rows, K=3"):
        fit(torch.ones(2, 2), 3, who="client 7")


@both
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_clusters": 0}, "n_clusters"),
        ({"n_clusters": 2.0}, "n_clusters"),
        ({"n_clusters": True}, "n_clusters"),
        ({"n_init": 0}, "n_init"),
        ({"max_iter": 0}, "max_iter"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed"),
        ({"tol": -1.0}, "tol"),
        ({"tol": float("nan")}, "tol"),
        ({"init": torch.zeros(3, 2)}, r"init must have shape \(2, 2\), got \(3, 2\)"),
        ({"init": torch.zeros(2, 5)}, r"init must have shape \(2, 2\), got \(2, 5\)"),
    ],
)
def test_arguments_out_of_range_are_named(fit: Fit, arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(torch.rand(6, 2), **{"n_clusters": 2, **arguments})


@both
def test_one_dimensional_input_is_refused(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"shape \(rows, features\), got \(6,\)"):
        fit(torch.rand(6), 2)


@both
def test_kind_and_type_of_the_input_come_back(fit: Fit) -> None:
    x = blobs(10)
    as_array = fit(x.numpy(), 4, seed=0)
    as_tensor = fit(x, 4, seed=0)
    assert isinstance(as_array.centers, np.ndarray)
    assert isinstance(as_array.labels, np.ndarray)
    assert np.array_equal(as_array.centers, as_tensor.centers.numpy())
    assert as_tensor.centers.dtype == torch.float32
    assert as_tensor.labels.dtype == torch.int64
    assert fit(x.double(), 4).centers.dtype == torch.float64
    assert fit(x.half(), 4).centers.dtype == torch.float32
    assert fit(x.clone().requires_grad_(), 4).centers.requires_grad is False


@both
def test_input_and_start_are_not_modified(fit: Fit) -> None:
    x, start = blobs(10), blobs(10)[:4].clone()
    before = (x.clone(), start.clone())
    fit(x, 4, init=start)
    assert torch.equal(x, before[0])
    assert torch.equal(start, before[1])


def test_half_precision_rows_do_not_overflow_their_squares() -> None:
    x = torch.tensor([[300.0, -300.0], [-300.0, 300.0]], dtype=torch.float16).repeat(4, 1)
    result = torch_kmeans(x, 2)
    assert result.n_populated == 2
    assert result.inertia == 0
    assert squared_distances(x, torch.zeros(1, 2))[0, 0] == 180000


def test_assign_breaks_ties_towards_the_lower_index() -> None:
    x = torch.tensor([[0.0], [1.0], [-1.0]])
    assert assign(x, torch.tensor([[1.0], [-1.0], [1.0]])).tolist() == [0, 0, 1]
    assert assign(x.numpy(), np.array([[2.0], [2.0]])).tolist() == [0, 0, 0]


def test_distances_in_chunks_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, centers = uniform(101, 3, 0), uniform(7, 3, 1)
    whole, labels, fit = squared_distances(x, centers), assign(x, centers), torch_kmeans(x, 7, init=centers)
    monkeypatch.setattr("fedclust.clustering.lloyd._CHUNK", 50)
    assert torch.equal(squared_distances(x, centers), whole)
    assert torch.equal(assign(x, centers), labels)
    assert torch.allclose(torch_kmeans(x, 7, init=centers).centers, fit.centers, atol=1e-6)
    assert torch.allclose(whole, torch.cdist(x.double(), centers.double()).square().float(), rtol=1e-5)


def test_distances_refuse_centres_of_another_width() -> None:
    with pytest.raises(ValueError, match=r"centers must have shape \(K >= 1, 3\), got \(2, 4\)"):
        assign(torch.zeros(5, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="1 of 2 rows of centers"):
        squared_distances(torch.zeros(5, 1), torch.tensor([[0.0], [float("nan")]]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_stay_there_and_agree_with_the_cpu() -> None:
    x = blobs()
    start = x[[0, 40, 80, 120]]
    here, there = kmeans(x, 4, init=start), kmeans(x.cuda(), 4, init=start)
    assert there.centers.is_cuda
    assert torch.equal(here.labels, there.labels.cpu())
    assert torch.allclose(here.centers, there.centers.cpu(), atol=1e-5)
    assert torch.equal(kmeans(x.cuda(), 4, seed=3).centers, kmeans(x.cuda(), 4, seed=3).centers)
