"""Every method: order, interruption, resources and threads change no bit of a result; the seed does."""

from __future__ import annotations

import threading
from typing import Any

import psutil
import pytest
import torch
from pytorch_lightning.callbacks import Callback

from fedclust.federation.backend import InProcess
from fedclust.federation.errors import ClientError
from fedclust.federation.processes import Processes


def test_two_runs_are_equal_and_other_seeds_differ(run: Any) -> None:
    first, second = run(), run(folder="again")
    assert first.bits() == second.bits()
    assert first.metrics() == second.metrics()
    different = {seed: run(seed=seed, folder=f"seed{seed}").bits() for seed in (1, 2)}
    states = [
        str(sorted((k, v) for k, v in bits.items() if k != "bytes")) for bits in (first.bits(), *different.values())
    ]
    assert len(set(states)) == 3


def test_global_generators_do_not_matter(run: Any) -> None:
    torch.manual_seed(1)
    first = run().bits()
    torch.manual_seed(2)
    assert run(folder="again").bits() == first


def test_shuffled_clients_are_equal(run: Any, shuffled: Any) -> None:
    expected = run()
    for seed in (1, 2):
        backend = shuffled(seed=seed)
        other = run(backend=backend, folder=f"shuffled{seed}")
        assert backend.ran[:3] + backend.ran[3:6] != [0, 1, 2, 0, 1, 2]
        assert other.bits() == expected.bits()
        assert other.metrics() == expected.metrics()


def test_worker_processes_are_equal(run: Any) -> None:
    expected = run()
    other = run(backend=Processes(), folder="processes")
    assert other.loop.backend._pool is not None
    other.loop.backend.close()
    assert other.bits() == expected.bits()
    assert other.metrics() == expected.metrics()


def test_state_in_files_is_equal(run: Any) -> None:
    expected = run()
    other = run(backend=InProcess(state_budget_mb=0), folder="files")
    assert other.bits() == expected.bits()
    assert other.loop.backend.states._files.keys() == {c for c in range(3) if expected.loop.backend.states.get(c)}


def test_threads_outside_do_not_matter_where_the_backend_sets_its_own(run: Any) -> None:
    expected = run(backend=InProcess(threads=1)).bits()
    torch.set_num_threads(2)
    try:
        assert run(backend=InProcess(threads=1), folder="two").bits() == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("cohort_size", [None, 2])
def test_resumed_in_the_middle_is_equal(run: Any, cohort_size: int | None) -> None:
    expected = run(4, cohort_size=cohort_size)
    half = run(2, cohort_size=cohort_size, folder="half")
    assert half.bits() != expected.bits()
    rest = run(4, cohort_size=cohort_size, folder="rest", resume=half.folder / "last.ckpt")
    assert rest.trainer.current_epoch == 4
    assert rest.bits() == expected.bits()
    assert rest.metrics() == expected.metrics()


def test_resumed_from_the_start_checkpoint_is_equal_and_does_not_start_again(run: Any, monkeypatch: Any) -> None:
    expected = run(2)
    started = []
    monkeypatch.setattr(type(expected.loop.algorithm), "start", lambda *_: started.append(1))
    other = run(2, folder="other", resume=expected.folder / "start.ckpt")
    assert started == []
    assert other.bits() == expected.bits()


class Stop(Callback):
    """Fails in the middle of a round: every client's work of that round is lost."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 2:
            ask = pl_module.backend.run

            def fail_late(actions: Any, messages: Any, shared: Any) -> Any:
                for count, outcome in enumerate(ask(actions, messages, shared)):
                    if count == 1:
                        raise ConnectionError("the power went out")
                    yield outcome

            pl_module.backend.run = fail_late


def test_broken_off_inside_a_round_and_resumed_is_equal(run: Any) -> None:
    expected = run(4)
    with pytest.raises(ConnectionError):
        run(4, folder="broken", callbacks=[Stop()])
    rest = run(4, folder="rest", resume=expected.folder.parent / "broken" / "last.ckpt")
    assert rest.bits() == expected.bits()


def test_a_second_run_of_the_same_objects_is_equal(run: Any, trainer: Any) -> None:
    first = run()
    expected = first.bits()
    again = type(first.loop)(first.loop.algorithm, first.loop.client, first.loop.backend)
    trainer(3, folder="again").fit(again, datamodule=first.data)
    first.loop = again
    assert first.bits() == expected


def test_a_run_in_another_thread_is_equal(run: Any) -> None:
    expected, found = run().bits(), []
    thread = threading.Thread(target=lambda: found.append(run(folder="thread").bits()))
    thread.start()
    thread.join(60)
    assert found == [expected]


def test_a_failing_client_stops_the_run_by_name(run: Any, method: Any, monkeypatch: Any) -> None:
    client = method.client()
    one, two = run(1, folder="one").loop.byte_counts(), run(2, folder="two").loop.byte_counts()
    name = next(action for action in two if two[action]["up"] > one[action]["up"])
    original = getattr(type(client), name)

    def fail(self: Any, message: Any, ctx: Any) -> Any:
        if ctx.id == 1 and ctx.round == 2:
            raise OSError("disk full")
        return original(self, message, ctx)

    fail.__fedclust_action__ = True
    monkeypatch.setattr(type(client), name, fail)
    with pytest.raises(ClientError, match=f"client 1, round 2, action '{name}': OSError: disk full"):
        run(3)


class Memory(Callback):
    """Resident memory after every round, in MB."""

    def __init__(self) -> None:
        self.sizes: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.sizes.append(psutil.Process().memory_info().rss / 1e6)


def test_memory_does_not_grow_with_the_rounds(run: Any) -> None:
    memory = Memory()
    run(30, callbacks=[memory])
    assert len(memory.sizes) == 30
    assert memory.sizes[-1] - memory.sizes[4] < 20
