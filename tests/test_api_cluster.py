"""`fedclust.cluster`: labels for plain arrays, one per client, in the order of their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score

import fedclust

QUICK: dict[str, Any] = {
    "geometry_pretrain": 0.0, "geometry_federated": 0.0, "pretrain_epochs": 3, "cluster_epochs": 1, "round_epochs": 1,
    "n_synthetic": 60,
}  # fmt: skip
SEPARATE: dict[str, Any] = {
    "geometry_pretrain": 0.0,
    "geometry_federated": 0.0,
    "pretrain_epochs": 40,
    "cluster_epochs": 10,
}


def shuffled_blobs(blob_arrays: Any, seed: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(size) for size in (60, 45, 50)]
    return [(x[order], y[order]) for (x, y), order in zip(blob_arrays((60, 45, 50)), orders, strict=True)]


def test_cluster_gives_one_label_per_row_in_the_given_order(blob_arrays: Any) -> None:
    clients = shuffled_blobs(blob_arrays)
    labels = fedclust.cluster([x for x, _ in clients], 3, rounds=2, hidden_dims=[32], **SEPARATE)
    assert [(len(own), own.dtype) for own in labels] == [(60, np.int64), (45, np.int64), (50, np.int64)]
    assert adjusted_rand_score(np.concatenate([y for _, y in clients]), np.concatenate(labels)) == 1.0


def test_cluster_takes_settings_of_the_network_too(blob_arrays: Any) -> None:
    clients = [x for x, _ in blob_arrays((30, 25))]
    quick = {**QUICK, "rounds": 1, "progress": False}
    slow, usual = (fedclust.cluster(clients, 3, lr=lr, **quick) for lr in (1e-9, 2.4e-3))
    assert any(not np.array_equal(a, b) for a, b in zip(slow, usual, strict=True))
    with pytest.raises(ValueError, match=r"cluster has no setting learning_rate; there are augment, batch_size,"):
        fedclust.cluster(clients, 3, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"client 0 must be a numpy array or torch tensor, not tuple; labels are not"):
        fedclust.cluster(list(blob_arrays((30, 25))), 3)


@pytest.mark.parametrize(("scale", "change"), [("minmax", 1), ("standard", 50), ("none", 1)])
def test_cluster_scales(blob_arrays: Any, scale: Any, change: float) -> None:
    clients = shuffled_blobs(blob_arrays)
    labels = fedclust.cluster(
        [change * x - 7 for x, _ in clients], 3, rounds=1, scale=scale, hidden_dims=[32], **SEPARATE
    )
    assert adjusted_rand_score(np.concatenate([y for _, y in clients]), np.concatenate(labels)) > 0.5


def test_cluster_takes_bytes_images_and_tensors(blob_arrays: Any) -> None:
    clients = [(255 * x).astype(np.uint8).reshape(-1, 2, 3) for x, _ in blob_arrays((30, 25))]
    expected = fedclust.cluster(clients, 3, rounds=1, **QUICK)
    assert [own.shape for own in expected] == [(30,), (25,)]
    for same in ([c.reshape(-1, 6) for c in clients], [torch.from_numpy(c) for c in clients], tuple(clients)):
        assert all(
            np.array_equal(a, b) for a, b in zip(expected, fedclust.cluster(same, 3, rounds=1, **QUICK), strict=True)
        )
    other = fedclust.cluster(clients, 3, rounds=1, seed=1, **QUICK)
    assert all(own.shape == (len(client),) for own, client in zip(other, clients, strict=True))


@pytest.mark.parametrize(
    ("clients", "n_clusters", "options", "text"),
    [
        (np.zeros((3, 20, 4)), 2, {}, "list with one array per client, not ndarray"),
        ([], 2, {}, "client|array"),
        ([np.zeros((20, 4)), np.zeros((20, 5))], 2, {}, "client 1: rows are"),
        (
            [np.random.default_rng(0).random((20, 4)), np.random.default_rng(1).random((3, 4))],
            4,
            {},
            "client 1 has 3 rows",
        ),
        ([np.full((20, 4), np.nan)], 2, {}, "not finite"),
        ([np.random.default_rng(0).random((20, 4))], 0, {}, "n_clusters"),
        ([np.random.default_rng(0).random((20, 4))], 2, {"latent_dim": 0}, "latent_dim"),
        ([np.random.default_rng(0).random((20, 4))], 2, {"scale": "log"}, "scale"),
        ([np.random.default_rng(0).random((20, 4))], 2, {"rounds": 0}, "rounds"),
        ([np.random.default_rng(0).random((20, 4))], 2, {"sampling": "wild"}, "sampling"),
    ],
    ids=range(10),
)
def test_cluster_refuses_what_cannot_work(clients: Any, n_clusters: int, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fedclust.cluster(clients, n_clusters, **{**QUICK, **options})


def test_hidden_dims_must_be_a_list() -> None:
    with pytest.raises(ValueError, match=r"hidden_dims must be a list of widths such as \[128, 64\], got 128"):
        fedclust.cluster([np.eye(12, dtype=np.float32)] * 2, n_clusters=2, hidden_dims=128)  # type: ignore[arg-type]
