"""Every method: what it logs, what its checkpoints hold, how it treats labels, empty clients and cohorts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import fedclust
from fedclust.data.datamodule import FederatedDataModule
from fedclust.data.partition_base import Partition
from fedclust.federation.checkpoint import KEY
from fedclust.federation.message import digest


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


def test_metrics_are_numbers_and_the_monitor_is_among_them(run: Any, method: Any) -> None:
    done = run()
    monitor, mode = done.loop.algorithm.default_monitor
    assert monitor in done.metrics()
    assert mode in ("min", "max")
    assert done.loop.algorithm.uses_labels(monitor) == method.needs_labels
    assert all(done.loop.algorithm.uses_labels(f"val/{name}") for name in done.loop.algorithm.label_metrics)
    assert monitor in done.loop.algorithm.metric_names(labels=True)
    assert all(isinstance(value, float) and not math.isnan(value) for value in done.metrics().values())
    assert {"bytes/up", "bytes/down", "clients/asked", "clients/failed"} <= done.metrics().keys()
    assert done.metrics()["clients/asked"] == 3
    assert done.metrics()["clients/failed"] == 0
    assert all(seconds >= 0 for seconds in done.loop.seconds.values())


def test_bytes_of_the_rounds_add_up(run: Any) -> None:
    """Those of the rounds, of what came before the first and of the last validation are all that there are."""
    done = run(3, callbacks=[counter := Counter()])
    totals = done.loop.byte_counts()
    for direction in ("up", "down"):
        total = sum(both[direction] for both in totals.values())
        rounds = [row[f"bytes/{direction}"] for row in counter.rounds]
        assert rounds[0] > 0
        assert min(rounds) >= 0
        assert counter.before[direction] + sum(rounds) + counter.after(totals)[direction] == total


class Counter(pl.Callback):
    """Bytes before the first round, in each round, and up to the end of the last round."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.rounds: list[dict[str, float]] = []
        self.before = _sums(pl_module.byte_counts())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rounds.append(dict(pl_module.latest))
        self.last = _sums(pl_module.byte_counts())

    def after(self, totals: dict[str, dict[str, int]]) -> dict[str, int]:
        return {direction: count - self.last[direction] for direction, count in _sums(totals).items()}


def _sums(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    return {direction: sum(both[direction] for both in counts.values()) for direction in ("up", "down")}


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


def test_labels_are_optional_or_their_lack_is_refused_before_training(run: Any, blobs: Any, method: Any) -> None:
    x_only = [x for x, _ in _arrays_of(blobs())]
    labelled = run()
    label_metrics = labelled.loop.algorithm.label_metrics
    assert {name.rpartition("/")[2] for name in labelled.metrics()} & label_metrics == label_metrics
    data = FederatedDataModule(x_only, seed=0, val_fraction=0.2, test_fraction=0.2)
    if method.needs_labels:
        with pytest.raises(ValueError, match="needs labels"):
            run(data=data, folder="bare")
        assert not list((labelled.folder.parent / "bare").glob("*.ckpt"))
        return
    bare = run(data=data, folder="bare")
    assert not {name.rpartition("/")[2] for name in bare.metrics()} & label_metrics
    bare.trainer.test(bare.loop, datamodule=bare.data, verbose=False)
    assert not {name.rpartition("/")[2] for name in bare.metrics()} & label_metrics


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
        assert digest(state[name]) == digest(value)


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
    with pytest.raises(ValueError, match=r"written with train rows \["):
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
    assert math.isfinite(done.metrics()[done.loop.algorithm.default_monitor[0]])


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
    # A small tensor that happens to equal the one before is not sent down again: those bytes depend on values.
    up, expected_up = ({name: both["up"] for name, both in r.loop.byte_counts().items()} for r in (done, exact))
    assert up == expected_up
    expected = exact.loop.state.to_flat()
    for name, value in done.loop.state.to_flat().items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == expected[name].dtype
            assert value.dtype not in (torch.float16, torch.bfloat16)


def test_fast_dev_run_is_one_round(run: Any) -> None:
    assert run(5, fast_dev_run=True).trainer.current_epoch == 1


def test_module_for_gives_the_model_that_predicts(run: Any, method: Any) -> None:
    done = run(1)
    module = method.client()
    module.build(done.data.input_shape, done.data.n_classes)
    assert done.loop.algorithm.module_for(done.loop.state, module) is module
    for part in done.predict():
        own = done.loop.backend.states.get(part["client"])
        loaded = done.loop.algorithm.module_for_client(done.loop.state, module, part["client"], own)
        assert loaded is module
        x = getattr(done.data.client(part["client"]), part["split"]).x
        assert torch.equal(module.assignments(x)[0], part["cluster"])


def test_a_saved_result_predicts_groups_and_assigns_like_the_run(run: Any, load_checkpoint: Any, tmp_path: Any) -> None:
    done = run(2)
    result = fedclust.load(done.folder / "last.ckpt")
    again = fedclust.load(result.save(tmp_path / "result.pt"))
    expected = {part["client"]: part["cluster"] for part in done.predict() if part["split"] == "test"}
    for found in (result, again):
        for client, clusters in expected.items():
            assert found.predict(done.data.client(client).test, client=client).tolist() == clusters.tolist()
        with pytest.raises(ValueError, match=r"no client 7; ids are 0\.\.2"):
            found.predict(done.data.test, client=7)
        if done.loop.algorithm.personal:
            with pytest.raises(ValueError, match="model of its own: say whose"):
                found.predict(done.data.test)
        if done.loop.algorithm.assignments(done.loop.state) is None:
            with pytest.raises(ValueError, match="does not group clients"):
                _ = found.assignments
            with pytest.raises(ValueError, match="does not group clients"):
                found.assign(done.data.client(0))
        else:
            assert found.assignments.keys() == {0, 1, 2}
            assert found.assign(done.data.client(0)) in found.assignments.values()
