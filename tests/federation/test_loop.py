"""The federated loop under a Trainer: flags, rounds, seeds, states, repeated use."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, EarlyStopping

from fedclust.federation import checkpoint
from fedclust.federation.algorithm import State
from fedclust.federation.backend import InProcess
from fedclust.federation.loop import FederatedLoop
from fedclust.federation.message import with_prefix
from fedclust.federation.refusals import refuse_unusable_flags


@pytest.fixture
def loop(toy: Any) -> Any:
    return lambda **options: FederatedLoop(toy.algorithm(), toy.client(), **options)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"gradient_clip_val": 1.0}, "trainer.gradient_clip_val.*max_grad_norm"),
        ({"gradient_clip_val": 0.0}, "trainer.gradient_clip_val"),
        ({"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches.*batch_size"),
        ({"precision": "64-true"}, r"trainer.precision '64-true'.*32-true, bf16-mixed, 16-mixed"),
        ({"precision": "bf16-true"}, "trainer.precision 'bf16-true'.*float32"),
        ({"precision": "16-true"}, "trainer.precision '16-true'"),
        ({"max_steps": 5}, "trainer.max_steps.*trainer.max_epochs"),
        ({"overfit_batches": 1}, "trainer.overfit_batches"),
        ({"val_check_interval": 0.5}, "trainer.val_check_interval.*check_val_every_n_epoch"),
        ({"barebones": True, "enable_checkpointing": False, "callbacks": None}, "trainer.barebones"),
        ({"devices": 2, "strategy": "ddp"}, "devices=1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_flags_that_cannot_work_are_refused_by_name(
    loop: Any, blobs: Any, tmp_path: Any, flags: Any, text: str
) -> None:
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    if "barebones" in flags:
        settings = {"accelerator": "cpu"}
        flags = {"barebones": True}
    trainer = pl.Trainer(max_epochs=1, default_root_dir=tmp_path, **{**settings, **flags})
    if trainer.world_size > 1:  # no processes are started: the flags are looked at before
        with pytest.raises(ValueError, match=text):
            refuse_unusable_flags(trainer)
        return
    with pytest.raises(ValueError, match=text):
        trainer.fit(loop(), datamodule=blobs())


def test_several_refused_flags_are_all_named(loop: Any, blobs: Any, tmp_path: Any) -> None:
    trainer = pl.Trainer(
        gradient_clip_val=1.0, accumulate_grad_batches=3, default_root_dir=tmp_path, logger=False, max_epochs=1
    )
    with pytest.raises(ValueError, match=r"gradient_clip_val.*accumulate_grad_batches"):
        trainer.fit(loop(), datamodule=blobs())


def test_flags_that_work(loop: Any, blobs: Any, trainer: Any) -> None:
    asked = trainer(
        9, check_val_every_n_epoch=2, limit_val_batches=1, callbacks=[EarlyStopping("train/asked", patience=3)]
    )
    module = loop()
    asked.fit(module, datamodule=blobs())
    assert asked.current_epoch == 8  # looked at in rounds 2, 4, 6, 8: the first value and three without gain
    assert asked.global_step == 8


def test_a_plain_data_module_is_refused(loop: Any, trainer: Any) -> None:
    class Other(pl.LightningDataModule):
        def train_dataloader(self) -> list[int]:
            return [0]

    with pytest.raises(TypeError, match=r"fedclust.FederatedDataModule"):
        trainer().fit(loop(), datamodule=Other())


def test_what_exists_only_later_says_so(loop: Any) -> None:
    with pytest.raises(RuntimeError, match=r"run fit first"):
        _ = loop().state
    with pytest.raises(RuntimeError, match=r"has not been set up"):
        _ = loop().server


def test_validating_before_training_says_so(loop: Any, blobs: Any, trainer: Any) -> None:
    with pytest.raises(RuntimeError, match=r"nothing was trained yet"):
        trainer().test(loop(), datamodule=blobs(), verbose=False)


@pytest.mark.parametrize(
    "options", [{"cohort_size": 0}, {"participation": 2.0}, {"cohort_size": 1, "participation": 0.5}]
)
def test_bad_cohorts_are_refused_at_once(loop: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=r"cohort_size|participation"):
        loop(**options)


def test_rounds_by_hand(loop: Any, blobs: Any, trainer: Any) -> None:
    data, module = blobs(val_fraction=0.0, test_fraction=0.0), loop()
    trainer(3).fit(module, datamodule=data)
    means = torch.stack([data.client(client).train.x.mean(0) for client in range(3)]).mean(0)
    # Each step halves the distance to the mean: 1 - (1 - 2/4)^3 of the way after three rounds.
    assert torch.allclose(module.state.w, means * (1 - 0.5**3), atol=1e-6)
    assert [module.backend.states.get(client)["rounds"].tolist() for client in range(3)] == [[1, 2, 3]] * 3


def test_absent_clients_find_their_state_again(loop: Any, blobs: Any, trainer: Any) -> None:
    module = loop(cohort_size=2)
    asked: list[list[int]] = []
    original = module.algorithm.round
    module.algorithm.round = lambda state, cohort, server: asked.append(cohort) or original(state, cohort, server)
    trainer(8).fit(module, datamodule=blobs((9, 9, 9, 9)))
    for client in range(4):
        took_part = [number for number, cohort in enumerate(asked, 1) if client in cohort]
        assert module.backend.states.get(client)["rounds"].tolist() == took_part
        assert len(took_part) < 8
    assert any(later - earlier > 2 for c in range(4) for earlier, later in _gaps(asked, c))


def _gaps(asked: list[list[int]], client: int) -> list[tuple[int, int]]:
    numbers = [number for number, cohort in enumerate(asked, 1) if client in cohort]
    return list(itertools.pairwise(numbers))


def test_a_method_may_train_while_it_is_evaluated(loop: Any, blobs: Any, trainer: Any) -> None:
    module, data = loop(), blobs()
    runner = trainer(1)
    runner.fit(module, datamodule=data)
    before = {client: module.backend.states.get(client) for client in range(3)}
    found = runner.validate(module, datamodule=data, verbose=False)
    assert found[0]["val/loss"] > 0
    runner.fit_loop.max_epochs = 2
    runner.fit(module, datamodule=data)  # what evaluation touched can still be trained
    assert all(not value.is_inference() for state in before.values() for value in state.values())
    assert not module.client.w.is_inference()


def test_the_seed_is_the_data_modules(loop: Any, blobs: Any, trainer: Any) -> None:
    for seed in (0, 7):
        module = loop()
        trainer(1).fit(module, datamodule=blobs(seed=seed))
        assert module.resolved_seed == module.server.context.seed == module.backend.resident.seed == seed


def test_other_data_starts_afresh_and_another_trainer_changes_the_precision(
    loop: Any, blobs: Any, trainer: Any
) -> None:
    module, data = loop(), blobs()
    trainer(2).fit(module, datamodule=data)
    first = module.state.w.clone()
    trainer(2).fit(module, datamodule=blobs(data_seed=1))
    other = module.state.w.clone()
    trainer(2).fit(module, datamodule=data)
    assert torch.equal(module.state.w, first)
    assert not torch.equal(other, first)
    trainer(1, precision="bf16-mixed").test(module, datamodule=data, verbose=False)
    assert module.backend.resident.precision == module.server.context.precision == "bf16-mixed"


def test_validation_of_every_round_is_numbered_like_the_round(loop: Any, blobs: Any, trainer: Any) -> None:
    numbers: list[int] = []
    module = loop()
    original = module.algorithm.evaluate
    module.algorithm.evaluate = lambda state, server, split: (
        numbers.append(server.context.round) or original(state, server, split)
    )
    trainer(3).fit(module, datamodule=blobs())
    assert numbers == [1, 2, 3]


def test_trainer_autocast_covers_only_local_work(loop: Any, blobs: Any, trainer: Any) -> None:
    seen: list[bool] = []
    module = loop()
    original = module.algorithm.round
    module.algorithm.round = lambda state, cohort, server: (
        seen.append(torch.is_autocast_enabled("cpu")) or original(state, cohort, server)
    )
    trainer(1, precision="bf16-mixed").fit(module, datamodule=blobs())
    assert seen == [False]


def test_skipped_clients_are_counted_per_round(loop: Any, blobs: Any, trainer: Any) -> None:
    module = loop(backend=InProcess(on_failure="skip"))
    original = module.client.pull

    def pull(message: Any, ctx: Any) -> Any:
        if ctx.id == 1 and ctx.round == 2:
            raise OSError("away")
        return original(message, ctx)

    module.client.pull = pull
    failed: list[float] = []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            failed.append(pl_module.latest["clients/failed"])

    trainer(3, callbacks=[Watch()]).fit(module, datamodule=blobs())
    assert failed == [0.0, 1.0, 0.0]
    assert module.backend.states.get(1)["rounds"].tolist() == [1, 3]
    assert str(module.backend.failures[0]) == "client 1, round 2, action 'pull': OSError: away"


def test_state_to_flat_and_back() -> None:
    @dataclass
    class Mixed(State):
        weights: dict[str, torch.Tensor]
        centers: torch.Tensor
        count: int
        name: str | None

    state = Mixed({"a": torch.ones(1), "b.c": torch.zeros(2)}, torch.eye(2), 3, None)
    flat = state.to_flat()
    assert list(flat) == ["weights/a", "weights/b.c", "centers", "count", "name"]
    back = Mixed.from_flat(flat)
    assert back.weights.keys() == {"a", "b.c"}
    assert (back.count, back.name) == (3, None)
    with pytest.raises(KeyError, match=r"weights"):
        Mixed.from_flat({"centers": 1, "count": 1, "name": "x", **with_prefix("other", {"a": torch.ones(1)})})


def test_checkpoint_arguments_must_be_plain() -> None:
    assert checkpoint.plain_arguments({"a": (1, 2), "b": None, "c": "x", "d": [0.5]}) == {
        "a": [1, 2], "b": None, "c": "x", "d": [0.5]
    }  # fmt: skip
    with pytest.raises(TypeError, match=r"argument 'net' is a Linear"):
        checkpoint.plain_arguments({"net": torch.nn.Linear(1, 1)})


@pytest.mark.parametrize("native", [True, False])
def test_half_precision_that_is_only_emulated_is_announced(
    native: bool, loop: Any, blobs: Any, trainer: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native, raising=False)
    for precision in ("32-true", "bf16-mixed"):
        module = loop()
        trainer(1, precision=precision).fit(module, datamodule=blobs())
        noted = any("32-true" in note for note in module.notes)
        assert noted == (precision == "bf16-mixed" and not native)


def test_a_metric_that_a_round_does_not_give_is_not_the_one_before(loop: Any, blobs: Any, trainer: Any) -> None:
    module = loop()
    original = module.algorithm.round

    def round(state: Any, cohort: Any, server: Any) -> Any:
        state, metrics = original(state, cohort, server)
        return state, {**metrics, **({"clusters/delta": 1.0} if server.context.round == 1 else {})}

    module.algorithm.round = round
    seen: list[dict[str, float]] = []

    class Keep(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(dict(pl_module.latest))

    trainer(2, callbacks=[Keep()]).fit(module, datamodule=blobs())
    assert ["clusters/delta" in row for row in seen] == [True, False]
    assert all(any(name.startswith("val/") for name in row) for row in seen)
