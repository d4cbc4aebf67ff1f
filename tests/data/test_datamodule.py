"""FederatedDataModule: splits, seeds, records, transforms, memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition import Dirichlet, Iid, LabelGroups, Natural
from fedclust.data.sources import load_source
from fedclust.data.tables import Table
from fedclust.data.transforms import LabelSwaps, Rotations

RNG = np.random.default_rng(0)
X, Y = RNG.random((100, 6)).astype(np.float32), np.arange(100) % 4


def rows_of(data: FederatedDataModule) -> list[list[list[int]]]:
    clients = [data.client(number) for number in range(data.n_clients)]
    return [[own.train.rows.tolist(), own.val.rows.tolist(), own.test.rows.tolist()] for own in clients]


def test_digits_defaults() -> None:
    data = FederatedDataModule()
    assert (data.name, data.n_clients, data.input_shape, data.n_classes) == ("digits", 5, (1, 8, 8), 10)
    assert sum(data.n_rows) + len(data.val) == 1438
    assert len(data.test) == 359
    assert data.n_rows == [len(data.client(number).train) for number in range(5)]
    assert data.partition.describe()["args"]["alpha"] == 0.5


@pytest.mark.parametrize("partition", [Iid(7), Dirichlet(7, 0.2), Dirichlet(3, 100.0), None])
@pytest.mark.parametrize("labelled", [True, False])
def test_every_row_is_in_one_part_and_values_follow(partition: Any, labelled: bool) -> None:
    if not labelled and isinstance(partition, Dirichlet):
        with pytest.raises(ValueError, match="the data has no labels"):
            FederatedDataModule((X,), partition).setup()
        return
    data = FederatedDataModule((X, Y) if labelled else (X,), partition)
    everything = [row for parts in rows_of(data) for part in parts for row in part]
    assert sorted(everything) == list(range(100))
    for number in range(data.n_clients):
        own = data.client(number)
        for table in (own.train, own.val, own.test):
            assert torch.equal(table.x, torch.from_numpy(X[table.rows]))
            assert (table.y is not None) == labelled
            if table.y is not None:
                assert table.y.tolist() == Y[table.rows].tolist()
    assert data.n_classes == (4 if labelled else None)


def test_pooled_tables_are_the_clients_in_order() -> None:
    data = FederatedDataModule((X, Y), Iid(3))
    for part in ("train", "val", "test"):
        pooled: Table = getattr(data, part)
        pieces = [getattr(data.client(number), part) for number in range(3)]
        assert torch.equal(pooled.x, torch.cat([piece.x for piece in pieces]))
        assert pooled.rows.tolist() == [row for piece in pieces for row in piece.rows.tolist()]


def test_validation_is_stratified() -> None:
    x, y = np.zeros((1000, 2)), np.repeat([0, 1], [800, 200])
    own = FederatedDataModule((x, y), Natural(np.zeros(1000, dtype=int)), test_fraction=0.0).client(0)
    assert own.val.y is not None
    assert torch.bincount(own.val.y).tolist() == [80, 20]
    assert len(own.train) == 900
    assert len(own.test) == 0


def test_tiny_clients_keep_a_training_row() -> None:
    data = FederatedDataModule([X[:1], X[1:3], X[3:60]], val_fraction=0.9, test_fraction=0.5)
    assert min(data.n_rows) >= 1
    assert data.n_rows[0] == 1
    assert len(data.client(0).val) == 0
    assert len(data.client(0).test) == 0


def test_no_validation_share() -> None:
    data = FederatedDataModule((X, Y), Iid(3), val_fraction=0)
    assert len(data.val) == 0
    assert data.val_dataloader() == []
    assert sum(data.n_rows) == 80


def test_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """C11 for the data: equal seeds give equal parts, 0 is a seed, and the test rows do not depend on it."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    parts = {seed: rows_of(FederatedDataModule("digits", seed=seed)) for seed in (0, 1, 2)}
    assert parts[0] == rows_of(FederatedDataModule("digits", seed=0)) == rows_of(FederatedDataModule("digits"))
    assert parts[0] != parts[1] != parts[2]
    tests = [sorted(row for client in parts[seed] for row in client[2]) for seed in parts]
    assert tests[0] == tests[1] == tests[2]
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    assert rows_of(FederatedDataModule("digits")) == parts[2]
    assert rows_of(FederatedDataModule("digits", seed=0)) == parts[0]
    assert FederatedDataModule("digits").resolved_seed == 2
    monkeypatch.setenv("PL_GLOBAL_SEED", "two")
    with pytest.raises(ValueError, match="PL_GLOBAL_SEED must be a whole number of at least 0, got 'two'"):
        FederatedDataModule("digits").setup()


def test_own_test_rows_of_natural_clients() -> None:
    data = FederatedDataModule([X[:50], X[50:80], X[80:]])
    assert data.client_names == ["0", "1", "2"]
    for number, (start, stop) in enumerate([(0, 50), (50, 80), (80, 100)]):
        own = data.client(number)
        rows = np.concatenate([own.train.rows, own.val.rows, own.test.rows])
        assert sorted(rows.tolist()) == list(range(start, stop))
        assert len(own.test) == (stop - start) // 5


def test_ids_given_with_the_partition() -> None:
    ids = ["north"] * 30 + ["south"] * 70
    data = FederatedDataModule((X, Y), Natural(ids))
    assert data.client_names == ["north", "south"]
    assert [len(data.client(number).test) for number in range(2)] == [6, 14]
    assert data.client(0).train.rows.max() < 30
    with pytest.raises(ValueError, match="99 client ids for 100 rows"):
        FederatedDataModule((X, Y), Natural(ids[:-1])).setup()
    with_test = FederatedDataModule((X, Y, X[:10], Y[:10]), Natural(ids))
    # labels of the ten test rows: 3 3 2 2; north trains on 8 8 7 7 of 25 each, so it gets .96 .96 .56 .56, rounded
    assert [len(with_test.client(number).test) for number in range(2)] == [4, 6]


def test_source_objects() -> None:
    source = load_source((X, Y), test_fraction=0.5)
    assert len(FederatedDataModule(source, Iid(2)).test) == 50
    bare = type(source)("bare", source.train, None)
    data = FederatedDataModule(bare, Iid(2))
    assert (len(data.test), data.n_classes) == (10, 4)
    for option in ({"scale": "standard"}, {"layout": "channels_last"}):
        with pytest.raises(ValueError, match="a Source is taken as it is"):
            FederatedDataModule(source, Iid(2), **option).setup()
    strangers = type(source)("wards", source.train, source.test, ids=np.zeros(50, int), test_ids=np.ones(50, int))
    with pytest.raises(ValueError, match=r"clients \['1'\] have test rows but no training rows"):
        FederatedDataModule(strangers).setup()


@pytest.mark.parametrize("seed", range(3))
def test_test_parts_follow_the_training_proportions(seed: int) -> None:
    data = FederatedDataModule("digits", Dirichlet(5, 0.3), seed=seed)
    for number in range(5):
        own = data.client(number)
        assert own.train.y is not None
        assert own.val.y is not None
        assert own.test.y is not None
        train = torch.bincount(torch.cat([own.train.y, own.val.y]), minlength=10).double()
        test = torch.bincount(own.test.y, minlength=10).double()
        assert (test - train * 359 / 1438).abs().max() < 1.6


def test_empty_clients_are_listed() -> None:
    """A3: only if asked for, in a warning and in the record."""
    labels = np.arange(50) % 3
    data = FederatedDataModule((X[:50], labels), Dirichlet(10, 1e-3, min_size=0))
    with pytest.warns(UserWarning, match=r"clients \[.*\] of 10 have no rows"):
        data.setup()
    record = data.partition_record()
    empty = [number for number, rows in enumerate(data.n_rows) if rows == 0]
    assert empty
    assert record["empty_clients"] == empty
    assert record["clients"][empty[0]]["label_entropy"] is None
    assert len(data.client(empty[0]).train) == len(data.client(empty[0]).test) == 0


def test_record_is_json_and_finds_every_row_again() -> None:
    data = FederatedDataModule("digits", Dirichlet(4, 0.5, min_size=5), transform=Rotations([0.0, 90.0]), seed=3)
    record = json.loads(json.dumps(data.partition_record()))
    assert (record["source"], record["seed"], record["test_rows_in"]) == ("digits", 3, "common")
    expected = {"n_clients": 4, "alpha": 0.5, "min_size": 5, "max_draws": 1000}
    assert record["partition"] == {"class": "Dirichlet", "args": expected}
    assert record["transform"] == {"class": "Rotations", "args": {"degrees": [0.0, 90.0], "client_groups": None}}
    assert record["groups"] == [0, 1, 0, 1]
    assert [[client[part] for part in ("train", "val", "test")] for client in record["clients"]] == rows_of(data)
    entropies = [client["label_entropy"] for client in record["clients"]]
    assert record["mean_label_entropy"] == pytest.approx(np.mean(entropies))
    assert 0 < record["mean_label_entropy"] < np.log(10)
    unlabelled = FederatedDataModule([X[:50], X[50:]]).partition_record()
    assert json.loads(json.dumps(unlabelled))["mean_label_entropy"] is None


def test_transforms_change_all_parts_of_a_client() -> None:
    plain = FederatedDataModule("digits", Iid(4))
    turned = FederatedDataModule("digits", Iid(4), transform=Rotations())
    swapped = FederatedDataModule("digits", Iid(4), transform=LabelSwaps([[], [(0, 1)]]))
    for number in range(4):
        for part in ("train", "val", "test"):
            before: Table = getattr(plain.client(number), part)
            after: Table = getattr(turned.client(number), part)
            assert torch.equal(after.x, torch.rot90(before.x, number, dims=(2, 3)))
            labels: Table = getattr(swapped.client(number), part)
            assert before.y is not None
            assert labels.y is not None
            moved = {0: 1, 1: 0} if number % 2 else {}
            assert labels.y.tolist() == [moved.get(label, label) for label in before.y.tolist()]
    with pytest.raises(ValueError, match="Rotations needs images"):
        FederatedDataModule((X, Y), transform=Rotations()).setup()
    with pytest.raises(ValueError, match="LabelSwaps needs labels"):
        FederatedDataModule((X,), transform=LabelSwaps([[(0, 1)]])).setup()


def test_planted_groups() -> None:
    groups = LabelGroups([[0, 1], [2, 3]], clients_per_group=2)
    assert FederatedDataModule((X, Y), Iid(3)).groups is None
    planted = FederatedDataModule((X, Y), groups).groups
    assert planted is not None
    assert planted.tolist() == [0, 0, 1, 1]
    crossed = FederatedDataModule((X, Y), groups, transform=LabelSwaps([[], [(0, 1)]])).groups
    assert crossed is not None
    assert crossed.tolist() == [0, 1, 2, 3]


def test_asking_for_clients_again_costs_no_memory() -> None:
    data = FederatedDataModule((np.zeros((4000, 784), dtype=np.uint8), np.arange(4000) % 10), Iid(4))
    data.setup()
    assert data.client(2).train.x.data_ptr() == data.client(2).train.x.data_ptr()
    process = psutil.Process()
    before = process.memory_info().rss
    kept = [data.client(number % 4) for number in range(400)]
    data.setup("fit")
    assert len(kept) == 400
    assert process.memory_info().rss - before < 4_000_000


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"seed": True}, "seed must be a whole number of at least 0, got True"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 0.0}, "seed must be"),
        ({"val_fraction": 1.0}, "val_fraction must be at least 0 and below 1, got 1.0"),
        ({"val_fraction": -0.1}, "val_fraction"),
        ({"val_fraction": float("nan")}, "val_fraction"),
        ({"test_fraction": 1.5}, "test_fraction"),
        ({"test_fraction": "0.2"}, "test_fraction"),
        ({"batch_size": 0}, "batch_size"),
        ({"partition": 5}, "partition must be a Partition"),
        ({"transform": "Rotations"}, "transform must be a ClientTransform"),
    ],
)
def test_bad_arguments_are_refused_at_once(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FederatedDataModule("digits", **kwargs)


def test_bad_client_numbers_are_refused() -> None:
    data = FederatedDataModule((X, Y), Iid(3))
    for number in (-1, 3, True):
        with pytest.raises(ValueError, match=r"client must be in 0\.\.2"):
            data.client(number)
