"""UMAP targets: limits named before any work, finite results, equal bits, no abort with threads."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.sparse.linalg
import torch

from fedclust.clustering import geometry
from fedclust.clustering.geometry import check_umap_size, umap_embedding
from fedclust.random import numpy_generator


@pytest.fixture(autouse=True)
def _no_warning_escapes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def rows(n: int, d: int = 5, seed: int = 0) -> np.ndarray:
    return numpy_generator(seed, "rows").normal(size=(n, d)).astype(np.float32)


@pytest.mark.parametrize(("n", "d"), [(3, 2), (5, 4), (8, 8), (10, 10), (2, 1), (1, 1), (0, 1), (17, 16)])
def test_too_few_rows_are_refused_with_all_numbers(n: int, d: int) -> None:
    sentence = f"client 3: UMAP into {d} dimensions needs at least {d + 2} rows, got {n}"
    with pytest.raises(ValueError, match=sentence):
        check_umap_size(n, d, 15, "client 3")
    with pytest.raises(ValueError, match=sentence):
        umap_embedding(np.zeros((n, 3)), d, seed=0, who="client 3")


@pytest.mark.parametrize(("n", "d"), [(3, 1), (4, 2), (6, 4), (10, 8), (18, 16)])
def test_the_smallest_allowed_sizes_work(n: int, d: int) -> None:
    result = umap_embedding(rows(n), d, seed=0)
    assert result.target.shape == (n, d)
    assert result.target.dtype == np.float32
    assert np.isfinite(result.target).all()
    assert result.n_neighbors == min(15, n - 1)


@pytest.mark.parametrize("n_neighbors", [0, 1, -3, 2.5, True])
def test_fewer_than_two_neighbours_are_refused(n_neighbors: int) -> None:
    with pytest.raises(ValueError, match="server: n_neighbors must be at least 2, got"):
        umap_embedding(rows(10), 2, n_neighbors=n_neighbors, seed=0, who="server")


@pytest.mark.parametrize(("asked", "used"), [(2, 2), (9, 9), (10, 9), (11, 9), (15, 9)])
def test_neighbours_are_cut_to_the_rows_and_recorded(asked: int, used: int) -> None:
    assert check_umap_size(10, 2, asked) == used
    assert umap_embedding(rows(10), 2, n_neighbors=asked, seed=0).n_neighbors == used


def test_same_rows_and_seed_give_the_same_bits() -> None:
    x = rows(60)
    first, again = umap_embedding(x, 2, seed=3), umap_embedding(torch.from_numpy(x), 2, seed=3)
    assert np.array_equal(first.target, again.target)
    assert first.init == "spectral"
    assert not np.array_equal(first.target, umap_embedding(x, 2, seed=2**62 + 4).target)


def test_threads_at_once_give_the_bits_of_one_after_the_other() -> None:
    x = rows(50)
    with ThreadPoolExecutor(4) as pool:
        targets = [e.target for e in pool.map(lambda seed: umap_embedding(x, 2, seed=seed), [0, 1, 0, 1])]
    assert np.array_equal(targets[0], umap_embedding(x, 2, seed=0).target)
    assert np.array_equal(targets[1], targets[3])


def test_rows_stay_paired_with_their_targets() -> None:
    x = np.concatenate([rows(30), rows(30, seed=1) + 50])
    target = umap_embedding(x, 2, n_neighbors=10, seed=0).target
    gap = np.linalg.norm(target[:30].mean(axis=0) - target[30:].mean(axis=0))
    for part in (target[:30], target[30:]):
        assert np.linalg.norm(part - part.mean(axis=0), axis=1).max() < gap


def test_blobs_far_apart_are_placed() -> None:
    x = rows(40)
    x[20:] += 1e4
    assert np.isfinite(umap_embedding(x, 2, n_neighbors=5, seed=0).target).all()


ANGLES = np.linspace(0, 2 * np.pi, 40, endpoint=False)
SYMMETRIC = {
    "one row repeated": np.repeat(rows(1), 20, axis=0),
    "two rows repeated": np.repeat(rows(2), 20, axis=0),
    "ring": np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1),
    "one-hot": np.eye(20),
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_rows_are_placed_with_the_same_bits_each_time(name: str) -> None:
    targets = [umap_embedding(SYMMETRIC[name], 2, n_neighbors=5, seed=0).target for _ in range(8)]
    assert np.isfinite(targets[0]).all()
    assert len({target.tobytes() for target in targets}) == 1


def test_a_failed_spectral_start_falls_back_to_a_random_one_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, rng: object = None, **kwargs: object) -> None:
        raise scipy.sparse.linalg.ArpackNoConvergence("No convergence", np.zeros(0), np.zeros((0, 0)))

    monkeypatch.setattr(scipy.sparse.linalg, "eigsh", refuse)
    result = umap_embedding(rows(20), 2, seed=0)
    assert result.init == "random"
    assert np.isfinite(result.target).all()
    assert scipy.sparse.linalg.eigsh is refuse  # what was exchanged for the fit is put back


def test_an_eigensolver_that_raises_falls_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import umap.umap_ as inner

    def refuse(*args: object, **kwargs: object) -> None:
        raise TypeError("cannot use scipy.linalg.eigh for sparse A with k >= N")

    monkeypatch.setattr(inner, "spectral_layout", refuse)
    result = umap_embedding(rows(20), 2, seed=0)
    assert result.init == "random"
    assert np.isfinite(result.target).all()


def test_rows_cut_off_from_the_others_are_refused_by_number() -> None:
    x = rows(30) * 0.01
    x[[4, 9]] += np.array([[50.0], [-70.0]], dtype=np.float32)
    with pytest.raises(ValueError, match="client 2: UMAP could not place 2 of 30 rows"):
        umap_embedding(x, 2, n_neighbors=5, disconnection_distance=1.0, seed=0, who="client 2")


def test_zero_rows_under_cosine_are_placed() -> None:
    x = rows(30)
    x[:3] = 0
    assert np.isfinite(umap_embedding(x, 2, n_neighbors=5, metric="cosine", seed=0).target).all()


def test_a_non_finite_embedding_never_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = np.zeros((12, 2), dtype=np.float32)
    broken[5, 1] = np.nan
    monkeypatch.setattr(geometry, "_fit", lambda *_: (broken, "spectral"))
    with pytest.raises(ValueError, match="could not place 1 of 12 rows"):
        umap_embedding(rows(12), 2, seed=0)


def test_non_finite_input_and_bad_arguments_are_refused() -> None:
    x = rows(12)
    for name, value in (("seed", -1), ("min_dist", 1.5), ("min_dist", float("nan")), ("n_components", 0)):
        arguments = {"n_components": 2, "seed": 0, name: value}
        with pytest.raises(ValueError, match=name):
            umap_embedding(x, **arguments)
    x[3, 0] = np.inf
    with pytest.raises(ValueError, match="client 1: 1 of 12 rows of x"):
        umap_embedding(x, 2, seed=0, who="client 1")
