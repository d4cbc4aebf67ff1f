"""Kept embeddings are the same bits as computed ones; off unless asked for; damage is noticed."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fedclust.clustering import geometry
from fedclust.clustering.embeddings import EmbeddingCache, active_cache, keep_embeddings
from fedclust.clustering.geometry import umap_embedding


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts real computations, and replaces them by something quick that depends on all that the real one does."""
    seen: list[int] = []

    def fit(rows: np.ndarray, settings: dict, seed: int) -> tuple[np.ndarray, str]:
        seen.append(seed)
        scale = seed + settings["n_neighbors"] + 10 * settings["min_dist"]
        return (rows[:, : settings["n_components"]] * scale).astype(np.float32), "random" if seed == 9 else "spectral"

    monkeypatch.setattr(geometry, "_fit", fit)
    return seen


def test_the_same_bits_as_without_it(rows, tmp_path):
    plain = umap_embedding(rows, 2, n_neighbors=5, seed=3)
    with keep_embeddings(EmbeddingCache(tmp_path)):
        first = umap_embedding(rows, 2, n_neighbors=5, seed=3)
        again = umap_embedding(rows, 2, n_neighbors=5, seed=3)
    elsewhere = EmbeddingCache(tmp_path)
    with keep_embeddings(elsewhere):
        read = umap_embedding(rows, 2, n_neighbors=5, seed=3)
    assert (elsewhere.hits, elsewhere.misses) == (1, 0)
    for other in (first, again, read):
        assert other.target.tobytes() == plain.target.tobytes()
        assert (other.init, other.n_neighbors, other.target.dtype) == (plain.init, plain.n_neighbors, np.float32)


def test_off_unless_asked_for(rows, fits):
    cache = EmbeddingCache()
    with keep_embeddings(cache):
        assert active_cache() is cache
        umap_embedding(rows, 2, seed=0)
        umap_embedding(rows, 2, seed=0)
    assert (cache.hits, cache.misses, len(fits)) == (1, 1, 1)
    assert active_cache() is None
    umap_embedding(rows, 2, seed=0)
    assert (cache.hits, len(fits)) == (1, 2)


def test_whatever_the_result_depends_on_is_in_the_key(rows, fits, monkeypatch):
    with keep_embeddings(EmbeddingCache()):
        changed = rows.copy()
        changed[3, 4] += 1
        calls = [
            ((rows, 2), {"seed": 0}), ((rows, 3), {"seed": 0}), ((rows, 2), {"seed": 1}), ((changed, 2), {"seed": 0}),
            ((rows[::-1], 2), {"seed": 0}), ((rows, 2), {"seed": 0, "min_dist": 0.2}),
            ((rows, 2), {"seed": 0, "n_neighbors": 4}), ((rows, 2), {"seed": 0, "metric": "cosine"}),
            ((rows, 2), {"seed": 0, "disconnection_distance": 2.0}),
        ]  # fmt: skip
        for arguments, options in calls * 2:
            umap_embedding(*arguments, **options)
        assert len(fits) == len(calls)
        monkeypatch.setattr("fedclust.clustering.embeddings.version", lambda package: "another")
        umap_embedding(rows, 2, seed=0)
    assert len(fits) == len(calls) + 1


def test_what_is_given_can_be_changed_without_harm(rows, fits):
    with keep_embeddings(EmbeddingCache()):
        first = umap_embedding(rows, 2, seed=1).target
        kept = first.copy()
        first[:] = 0
        second = umap_embedding(rows, 2, seed=1).target
        assert np.array_equal(second, kept)
        second[:] = 0
        assert np.array_equal(umap_embedding(rows, 2, seed=1).target, kept)


def test_memory_has_a_limit_and_the_disk_goes_on(rows, fits, tmp_path):
    one = 40 * 2 * 4
    cache = EmbeddingCache(tmp_path, memory_mb=2.5 * one / 2**20)
    with keep_embeddings(cache):
        for seed in range(4):
            umap_embedding(rows, 2, seed=seed)
        assert cache.size() == 2 * one
        for seed in range(4):
            umap_embedding(rows, 2, seed=seed)
    assert len(fits) == 4
    assert len(list(tmp_path.iterdir())) == 4


def test_a_damaged_file_is_made_anew(rows, fits, tmp_path):
    with keep_embeddings(EmbeddingCache(tmp_path)):
        before = umap_embedding(rows, 2, seed=9)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-50])
    with keep_embeddings(EmbeddingCache(tmp_path)), pytest.warns(UserWarning, match="embedding.* damaged .* made anew"):
        after = umap_embedding(rows, 2, seed=9)
    assert len(fits) == 2
    assert np.array_equal(before.target, after.target)
    with keep_embeddings(EmbeddingCache(tmp_path)):
        assert umap_embedding(rows, 2, seed=9).init == "random"
    assert len(fits) == 2


def test_threads_share_it(rows, fits):
    cache = EmbeddingCache()
    with keep_embeddings(cache):
        umap_embedding(rows, 2, seed=0)
        threads = [threading.Thread(target=umap_embedding, args=(rows, 2), kwargs={"seed": 0}) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (cache.hits, len(fits)) == (4, 1)
