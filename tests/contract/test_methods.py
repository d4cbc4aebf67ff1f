"""Every method: what it logs, what its checkpoints hold, how it treats labels, empty clients and cohorts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition_base import Partition
from fedclust.federation.checkpoint import KEY

LABEL_METRICS = {"acc", "nmi", "ari"}


class Dealt(Partition):
    """Rows dealt in turn to the clients in `owners`; all other clients are empty."""

    def __init__(self, n_clients: int, owners: list[int]) -> None:
        self.n_clients, self.owners = n_clients, owners

    def _deal(self, labels: Any, n: int, seed: int) -> list[np.ndarray]:
        turns = np.arange(n) % len(self.owners)
        parts = [np.empty(0, dtype=np.int64)] * self.n_clients
        for turn, owner in enumerate(self.owners):
            parts[owner] = np.flatnonzero(turns == turn)
        return parts


def pooled(blob_arrays: Any, partition: Partition) -> FederatedDataModule:
    x, y = blob_arrays((90,))[0]
    return FederatedDataModule((x, y), partition, seed=0, val_fraction=0.2)


def test_metrics_are_numbers_and_the_monitor_is_among_them_and_needs_no_labels(run: Any) -> None:
    done = run()
    monitor, mode = done.loop.algorithm.default_monitor
    assert monitor in done.metrics()
    assert mode in ("min", "max")
    assert not done.loop.algorithm.uses_labels(monitor)
    assert all(done.loop.algorithm.uses_labels(f"val/{name}") for name in LABEL_METRICS)
    assert all(isinstance(value, float) and not math.isnan(value) for value in done.metrics().values())
    assert {"bytes/up", "bytes/down", "clients/asked", "clients/failed"} <= done.metrics().keys()
    assert done.metrics()["clients/asked"] == 3
    assert done.metrics()["clients/failed"] == 0
    assert all(seconds >= 0 for seconds in done.loop.seconds.values())


def test_bytes_of_the_rounds_add_up(run: Any) -> None:
    counts: list[tuple[float, float]] = []
    one = run(1).loop.byte_counts()
    done = run(3, folder="three")
    for direction in ("up", "down"):
        total = sum(both[direction] for both in done.loop.byte_counts().values())
        assert total > sum(both[direction] for both in one.values())
        counts.append((total, done.metrics()[f"bytes/{direction}"]))
    assert all(0 < last < total for total, last in counts)


def test_test_and_predict_leave_the_state_alone_and_cover_every_row_once(run: Any) -> None:
    done = run()
    before = {name: value for name, value in done.bits().items() if name != "bytes"}
    done.trainer.test(done.loop, datamodule=done.data, verbose=False)
    parts = done.predict()
    after = {name: value for name, value in done.bits().items() if name != "bytes"}
    assert before == after
    assert any(name.startswith("test/") for name in done.metrics())
    for client in range(done.data.n_clients):
        for split in ("train", "val", "test"):
            own = [part for part in parts if part["client"] == client and part["split"] == split]
            assert len(own) == 1
            table = getattr(done.data.client(client), split)
            assert own[0]["rows"].tolist() == table.rows.tolist()
            assert len(own[0]["cluster"]) == len(own[0]["distance"]) == len(table)
            assert torch.as_tensor(own[0]["distance"]).min() >= 0


def test_labels_are_optional(run: Any, blobs: Any) -> None:
    x_only = [x for x, _ in _arrays_of(blobs())]
    labelled = run()
    data = FederatedDataModule(x_only, seed=0, val_fraction=0.2, test_fraction=0.2)
    bare = run(data=data, folder="bare")
    names = {name.rpartition("/")[2] for name in bare.metrics()}
    assert not names & LABEL_METRICS
    assert {name.rpartition("/")[2] for name in labelled.metrics()} & LABEL_METRICS == LABEL_METRICS
    bare.trainer.test(bare.loop, datamodule=bare.data, verbose=False)
    assert not {name.rpartition("/")[2] for name in bare.metrics()} & LABEL_METRICS


def _arrays_of(data: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    tables = [[getattr(data.client(c), split) for split in ("train", "val", "test")] for c in range(data.n_clients)]
    return [(torch.cat([t.x for t in own]).numpy(), torch.cat([t.y for t in own]).numpy()) for own in tables]


def test_checkpoints_hold_plain_values_and_tensors_only(run: Any, load_checkpoint: Any) -> None:
    done = run(2)
    for name in ("start.ckpt", "last.ckpt"):
        saved = load_checkpoint(done.folder / name)
        assert saved[KEY]["seed"] == 0
        assert saved[KEY]["clients"].keys() <= {0, 1, 2}
        assert all(value is None or isinstance(value, (int, float, str, bool, list)) for value in
                   saved[KEY]["client_args"].values())  # fmt: skip
    state = type(done.loop.state).from_flat(saved[KEY]["state"]).to_flat()
    for name, value in done.loop.state.to_flat().items():
        assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value))


def test_a_checkpoint_predicts_like_the_run_that_wrote_it(run: Any, method: Any, trainer: Any) -> None:
    done = run(2)
    fresh = type(done)(type(done.loop)(method.algorithm(), method.client()), done.data, trainer(), done.folder)
    for ours, theirs in zip(fresh.predict(str(done.folder / "last.ckpt")), done.predict(), strict=True):
        assert torch.equal(torch.as_tensor(ours["cluster"]), torch.as_tensor(theirs["cluster"]))
        assert torch.equal(torch.as_tensor(ours["distance"]), torch.as_tensor(theirs["distance"]))


def test_wrong_checkpoints_are_refused(run: Any, blobs: Any, tmp_path: Any) -> None:
    path = run(1).folder / "last.ckpt"
    with pytest.raises(ValueError, match=r"seed 0, this run has 1"):
        run(2, seed=1, resume=path, folder="seed")
    with pytest.raises(ValueError, match=r"written with partition"):
        run(2, data=blobs((30, 20, 26)), resume=path, folder="partition")
    saved = torch.load(path, weights_only=True)
    for name, value, text in (("algorithm", "a.B", "written with algorithm 'a.B'"), ("format", 99, "format 99")):
        changed = {**saved, KEY: {**saved[KEY], name: value}}
        torch.save(changed, tmp_path / "changed.ckpt")
        with pytest.raises(ValueError, match=text):
            run(2, resume=tmp_path / "changed.ckpt", folder=name)
    torch.save({name: value for name, value in saved.items() if name != KEY}, tmp_path / "bare.ckpt")
    with pytest.raises(ValueError, match=r"not written by a federated run"):
        run(2, resume=tmp_path / "bare.ckpt", folder="bare")


def test_empty_clients_are_skipped_everywhere_and_named(run: Any, blob_arrays: Any) -> None:
    with_empty = run(data=pooled(blob_arrays, Dealt(5, [1, 2, 4])))
    assert any("clients [0, 3] hold no training rows" in note for note in with_empty.loop.notes)
    assert with_empty.metrics()["clients/asked"] == 3
    with_empty.trainer.test(with_empty.loop, datamodule=with_empty.data, verbose=False)
    assert {part["client"] for part in with_empty.predict()} == {1, 2, 4}
    assert [row["train"] > 0 for row in with_empty.loop.client_rows()] == [False, True, True, False, True]
    alone = run(1, data=pooled(blob_arrays, Dealt(3, [1])), folder="alone")
    assert alone.metrics()["clients/asked"] == 1


def test_clients_without_validation_rows_take_part(run: Any, blobs: Any) -> None:
    data = blobs((60, 5), val_fraction=0.1)
    assert [len(data.client(client).val) for client in range(2)][1] == 0
    done = run(data=data)
    assert math.isfinite(done.metrics()["val/recon"])


def test_no_validation_or_test_rows_at_all(run: Any, blobs: Any) -> None:
    done = run(data=blobs(val_fraction=0.0, test_fraction=0.0))
    assert not any(name.startswith(("val/", "test/")) for name in done.metrics())


def test_cohorts_are_a_function_of_seed_and_round_and_absent_clients_keep_their_state(
    run: Any, monkeypatch: Any
) -> None:
    algorithm = type(run(1).loop.algorithm)
    asked: list[list[int]] = []
    original = algorithm.round
    monkeypatch.setattr(
        algorithm,
        "round",
        lambda self, state, cohort, server: asked.append(cohort) or original(self, state, cohort, server),
    )
    run(6, cohort_size=1, folder="a")
    first, asked[:] = list(asked), []
    run(6, cohort_size=1, folder="b")
    assert asked == first
    assert all(len(cohort) == 1 for cohort in first)
    assert len({cohort[0] for cohort in first}) > 1
    asked.clear()
    run(6, cohort_size=1, seed=1, folder="c")
    assert asked != first


def test_more_clients_than_there_are_is_refused_before_training(run: Any) -> None:
    with pytest.raises(ValueError, match=r"cohort_size is 4, but only 3 clients"):
        run(cohort_size=4)


def test_mixed_precision_runs_and_exchanges_float32(run: Any) -> None:
    done = run(2, precision="bf16-mixed")
    exact = run(2, folder="exact")
    assert done.bits() != exact.bits()
    assert done.bits()["bytes"] == exact.bits()["bytes"]
    for value in done.loop.state.to_flat().values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert value.dtype == torch.float32


def test_fast_dev_run_is_one_round(run: Any) -> None:
    assert run(5, fast_dev_run=True).trainer.current_epoch == 1


def test_module_for_gives_the_state_s_model(run: Any, method: Any) -> None:
    done = run(1)
    module = method.client()
    module.build(done.data.input_shape, done.data.n_classes)
    loaded = done.loop.algorithm.module_for(done.loop.state, module)
    assert loaded is module
    if hasattr(module, "assignments"):
        x = done.data.train.x
        expected = torch.cat([part["cluster"] for part in done.predict() if part["split"] == "train"])
        assert torch.equal(module.assignments(x)[0], expected)
