"""All pairs of clients: symmetric, exact zeros, refusals that name the client."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from fedclust.clustering import distances as module
from fedclust.clustering.distances import (
    GRADIENT_METRICS,
    SEQUENCE_METRICS,
    dtw,
    fastdtw,
    gradient_distances,
    pairwise,
)
from fedclust.clustering.trees import adaptive_clusters
from fedclust.random import numpy_generator


def sequences(n: int, k: int, d: int, seed: int = 0) -> np.ndarray:
    rng = numpy_generator(seed, "sequences")
    return np.stack([rng.choice(d, k, replace=False) for _ in range(n)])


def set_distance(a: np.ndarray, b: np.ndarray) -> float:
    one, other = set(a.tolist()), set(b.tolist())
    return 1 - len(one & other) / len(one | other)


def rank_distance(a: np.ndarray, b: np.ndarray) -> float:
    one = {int(e): 1 / (2 + i) for i, e in enumerate(a)}
    other = {int(e): 1 / (2 + i) for i, e in enumerate(b)}
    shared = sum(one[e] * other[e] for e in one.keys() & other.keys())
    return 1 - shared / sum(w * w for w in one.values())


SINGLE = {"dtw": dtw, "fastdtw": fastdtw, "index_overlap": set_distance, "rank_overlap": rank_distance}


@pytest.mark.parametrize("metric", SEQUENCE_METRICS)
@pytest.mark.parametrize(("n", "k", "d"), [(9, 40, 100), (5, 1, 3), (2, 7, 36), (30, 25, 26), (4, 60, 10**7)])
def test_every_entry_is_the_distance_of_its_pair(metric: str, n: int, k: int, d: int) -> None:
    rows = sequences(n, k, d)
    rows[-1] = rows[0]
    matrix = pairwise(rows, metric)
    assert matrix.shape == (n, n)
    assert matrix.dtype == np.float64
    assert np.array_equal(matrix, matrix.T)
    assert not matrix.diagonal().any()
    assert matrix[0, -1] == 0
    for i in range(n):
        for j in range(i + 1, n):
            one, other = sorted([rows[i].tolist(), rows[j].tolist()])
            value = SINGLE[metric](np.array(one), np.array(other))
            assert matrix[i, j] == pytest.approx(value, rel=0, abs=1e-12 if "overlap" in metric else 0)


def test_hand_values() -> None:
    rows = [[14, 24, 20, 28, 11, 29], [22, 4, 5, 20, 24, 23]]
    assert pairwise(rows, "dtw")[0, 1] == 51
    assert pairwise(rows, "fastdtw")[0, 1] == 53
    assert pairwise(rows, "fastdtw", radius=6)[0, 1] == 51
    assert pairwise(rows, "index_overlap")[0, 1] == 1 - 2 / 10
    # Weights 1/2, 1/3: the one shared index is second in the one sequence and first in the other.
    assert pairwise([[5, 7], [7, 9]], "rank_overlap")[0, 1] == pytest.approx(1 - (1 / 6) / (1 / 4 + 1 / 9), abs=1e-12)


@pytest.mark.parametrize("metric", SEQUENCE_METRICS)
def test_neither_threads_nor_the_order_of_the_clients_change_a_distance(metric: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "_CELLS_PER_TASK", 1)  # one task per pair
    rows = np.concatenate([sequences(10, 33, 50), sequences(4, 33, 35, seed=1)])
    matrix = pairwise(rows, metric, threads=1)
    order = numpy_generator(0, "order").permutation(len(rows))
    assert np.array_equal(pairwise(rows, metric, threads=5), matrix)
    assert np.array_equal(pairwise(rows[order], metric, threads=3), matrix[np.ix_(order, order)])


def test_fastdtw_alone_is_not_symmetric_so_pairs_are_put_in_order() -> None:
    found = [
        (a, b) for a, b in zip(sequences(400, 9, 12), sequences(400, 9, 12, seed=1)) if fastdtw(a, b) != fastdtw(b, a)
    ]
    assert found
    for a, b in found:
        assert pairwise([a, b], "fastdtw")[0, 1] == pairwise([b, a], "fastdtw")[0, 1]


@pytest.mark.parametrize("metric", SEQUENCE_METRICS)
def test_one_client_and_equal_clients(metric: str) -> None:
    assert pairwise([[3, 1, 2]], metric).tolist() == [[0.0]]
    assert not pairwise(np.tile(sequences(1, 50, 80), (7, 1)), metric).any()


def test_overlap_of_indices_far_apart_and_of_a_huge_model() -> None:
    rows = np.array([[0, 2**61, 5], [2**61, 7, 8]])
    assert pairwise(rows, "index_overlap")[0, 1] == 1 - 1 / 5
    wide = np.array([[0, 4_194_303, 4_194_304, 90_000_000], [4_194_304, 90_000_000, 1, 2]])
    assert pairwise(wide, "index_overlap")[0, 1] == 1 - 2 / 6


def test_unsigned_sequences_do_not_wrap() -> None:
    rows = np.array([[0, 255], [255, 0], [1, 254]], np.uint8)
    assert pairwise(rows)[0].tolist() == [0, 510, 2]


def test_tensors_and_fractions() -> None:
    assert pairwise([torch.tensor([1, 2]), torch.tensor([4, 2])])[0, 1] == 3
    assert pairwise([[0.5, 1.0], [0.5, 1.25]])[0, 1] == 0.25


def test_sequences_a_a_b_b_make_two_clusters() -> None:
    a, b = sequences(2, 20, 1000)
    for metric in SEQUENCE_METRICS:
        assert adaptive_clusters(pairwise([a, a, b, b], metric)).clusters == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("rows", "metric", "message"),
    [
        ([], "dtw", "at least one client"),
        ([[1, 2], []], "dtw", "client c20: the sequence is empty"),
        (
            [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]],
            "dtw",
            "client c20: the sequence has 7 elements, that of client c10 has 5",
        ),
        ([[1, 2], [1.0, np.nan]], "dtw", "client c20: 1 of the 2 values"),
        ([[1, 2], [4, 4]], "index_overlap", "client c20: the coordinate index 4 appears more than once"),
        ([[1, 2], [4, 4]], "rank_overlap", "client c20: the coordinate index 4 appears more than once"),
        ([[1, 2], [-4, 4]], "index_overlap", "client c20: coordinate indices must be at least 0, got -4"),
        ([[1, 2.5], [3, 4]], "index_overlap", "client c10: overlap compares coordinate indices, got fractional"),
        ([[1, 2], [3, 4]], "l2", "metric must be one of dtw, fastdtw, index_overlap, rank_overlap, got 'l2'"),
    ],
)
def test_refusals_name_the_client(rows: list, metric: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pairwise(rows, metric, ids=["c10", "c20"][: len(rows)])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"radius": 0}, "radius must be"),
        ({"threads": 0}, "threads must be"),
        ({"max_seconds": 0}, "max_seconds must be above 0"),
        ({"ids": ["one"]}, "ids must name each of the 2 sequences, got 1"),
    ],
)
def test_arguments_out_of_range(argument: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pairwise([[1, 2], [3, 4]], **argument)


@pytest.mark.parametrize("metric", SEQUENCE_METRICS)
@pytest.mark.parametrize("n", [2, 12])
def test_progress_reaches_the_number_of_pairs(metric: str, n: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "_CELLS_PER_TASK", 5000)
    seen: list[tuple[int, int]] = []
    pairwise(sequences(n, 30, 99), metric, threads=2, progress=lambda done, total: seen.append((done, total)))
    pairs = n * (n - 1) // 2
    assert seen[-1] == (pairs, pairs)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert len(seen) > 1 or n == 2 or "overlap" in metric


def test_a_failing_progress_bar_ends_the_job() -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pairwise(sequences(12, 30, 99), progress=stop)


def test_a_job_that_would_take_too_long_is_not_started_and_a_long_one_is_announced(monkeypatch) -> None:
    rows = sequences(30, 300, 9999)
    with pytest.raises(
        ValueError, match=r"the distances of 435 pairs will take about \d+ s, more than max_seconds=1e-06"
    ):
        pairwise(rows, threads=1, max_seconds=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pairwise(rows, threads=1)
    monkeypatch.setattr(module, "_WARN_ABOVE", 1e-9)
    with pytest.warns(UserWarning, match="435 pairs will take about"):
        pairwise(rows, threads=1)


def gradients(n: int = 6, d: int = 50) -> np.ndarray:
    return numpy_generator(0, "gradients").normal(size=(n, d)) + np.arange(d)


@pytest.mark.parametrize(
    ("metric", "scipy_name"),
    [
        ("l2", "euclidean"),
        ("l1", "cityblock"),
        ("cosine", "cosine"),
        ("pearson", "correlation"),
        ("max_norm", "chebyshev"),
        ("mahalanobis", "seuclidean"),
    ],
)
@pytest.mark.parametrize("at_a_time", [2**22, 40])
def test_gradient_distances_equal_scipy(metric: str, scipy_name: str, at_a_time: int, monkeypatch) -> None:
    monkeypatch.setattr("fedclust.clustering.gradients._VALUES", at_a_time)
    g = gradients()
    extra = {"V": g.var(axis=0, ddof=1)} if metric == "mahalanobis" else {}
    found = gradient_distances(g, metric)
    np.testing.assert_allclose(found, cdist(g, g, scipy_name, **extra), atol=1e-12)
    assert np.array_equal(found, found.T)
    np.testing.assert_allclose(gradient_distances(torch.from_numpy(g).float(), metric), found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("metric", GRADIENT_METRICS)
def test_equal_gradients_zero_gradients_and_one_client(metric: str) -> None:
    g = gradients(5, 30)
    g[1] = g[0]
    g[3:] = 0
    found = gradient_distances(g, metric)
    assert np.isfinite(found).all()
    assert found[0, 1] == 0 == found[3, 4]
    assert not found.diagonal().any()
    assert found[0, 3] > 0
    if metric in ("cosine", "pearson"):
        assert found[0, 3] == 1
    assert gradient_distances(g[:1], metric).tolist() == [[0.0]]
    assert not gradient_distances(np.tile(g[:1], (4, 1)), metric).any()


def test_pearson_of_a_constant_gradient_and_cosine_of_tiny_ones() -> None:
    g = np.array([[0.1, 0.1, 0.1], [1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]])
    np.testing.assert_allclose(gradient_distances(g, "pearson"), [[0, 1, 1], [1, 0, 2], [1, 2, 0]], atol=1e-12)
    tiny = np.array([[3e-200, 0.0], [0.0, 4e-310]])
    np.testing.assert_allclose(gradient_distances(tiny, "cosine"), [[0, 1], [1, 0]], atol=1e-12)


def test_mahalanobis_leaves_constant_coordinates_out() -> None:
    g = np.array([[0.0, 0.1], [2.0, 0.1]])
    np.testing.assert_allclose(gradient_distances(g, "mahalanobis")[0, 1], np.sqrt(2))


@pytest.mark.parametrize(
    ("g", "metric", "message"),
    [
        ([[1.0, np.nan], [1, 2]], "l2", "client 0: 1 of the 2 values of the gradient"),
        ([1.0, 2.0], "l2", r"shape \(clients, coordinates\), got \(2,\)"),
        (np.empty((0, 3)), "l2", "shape"),
        ([[1.0]], "dtw", "metric must be one of l2"),
    ],
)
def test_gradient_refusals(g: object, metric: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradient_distances(g, metric)
