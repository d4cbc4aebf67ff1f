"""Processes: equal to InProcess, dead workers are replaced, and nothing is left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedclust.cores import available_cores
from fedclust.federation.backend import InProcess
from fedclust.federation.errors import ClientError
from fedclust.federation.message import digest
from fedclust.federation.processes import Processes

CPU = torch.device("cpu")
SHM = Path("/dev/shm")


def segments() -> set[str]:
    return {path.name for path in SHM.glob("fc*")} if SHM.is_dir() else set()


def is_worker(process: psutil.Process) -> bool:
    """Whether a process is one of ours: neither the tracker of shared memory nor the process that workers fork from."""
    try:
        parent, command = process.parent(), " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    if "spawn_main" in command:
        return True
    forked = parent is not None and "forkserver" in " ".join(parent.cmdline())
    return forked and process.status() != psutil.STATUS_ZOMBIE


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before, children = segments(), set(psutil.Process().children(recursive=True))
    yield
    assert segments() == before
    left = set(psutil.Process().children(recursive=True)) - children
    assert not [child for child in left if is_worker(child)]


@pytest.fixture
def connected(toy: Any, blobs: Any) -> Iterator[Callable[..., Processes]]:
    made: list[Processes] = []

    def connect(sizes: tuple[int, ...] = (4, 6, 8, 10), **options: Any) -> Processes:
        data = blobs(sizes, val_fraction=0.0, test_fraction=0.0)
        module = toy.client()
        module.build(data.input_shape, data.n_classes)
        backend = Processes(**options)
        made.append(backend)
        backend.connect(module, data, seed=5, device=CPU, precision="32-true")
        backend.round = 3
        return backend

    yield connect
    for backend in made:
        backend.close()


def die(backend: Processes, once: Path, *, always: bool = False) -> dict[int, Any]:
    shared = {"victim": 2, "once": str(once), "always": always}
    return backend.ask("die", {client: {} for client in range(4)}, shared=shared)


def test_clients_of_a_dead_worker_are_asked_again(connected: Any, tmp_path: Path, caplog: Any) -> None:
    backend = connected()
    backend.ask("pull", {client: {} for client in range(4)}, shared={"w": torch.zeros(6)})
    with caplog.at_level(logging.WARNING, "fedclust"):
        replies = die(backend, tmp_path / "died")
    assert list(replies) == [0, 1, 2, 3]
    assert os.getpid() not in {reply["pid"] for reply in replies.values()}
    (record,) = [record for record in caplog.records if "died" in record.getMessage()]
    assert "killed by SIGKILL" in record.getMessage()
    assert "in round 3" in record.getMessage()
    assert "2" in record.getMessage().partition("clients")[2]
    remembered = backend.ask("recall", {client: {} for client in range(4)})
    assert [reply["rounds"].tolist() for reply in remembered.values()] == [[3]] * 4


def test_a_client_whose_worker_dies_twice_fails_by_name(connected: Any, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"client 2, round 3, action 'die': its worker process died \(killed by SIG"):
        die(connected(), tmp_path / "died", always=True)


def test_skip_goes_on_without_the_client_whose_worker_dies(connected: Any, tmp_path: Path) -> None:
    backend = connected(on_failure="skip", retries=0, workers=1)
    replies = die(backend, tmp_path / "died", always=True)
    # With one worker the client behind the victim was sent along, but had not begun.
    assert set(replies) == {0, 1, 3}
    (failure,) = backend.failures
    assert (failure.client, failure.message.endswith("(killed by SIGKILL), once in this trip")) == (2, True)


@contextmanager
def at_most(seconds: float, backend: Processes) -> Iterator[None]:
    """Kills the workers of a backend that hangs, one after the other, so that its question ends with failures."""
    done = threading.Event()

    def end() -> None:
        wait = seconds
        while not done.wait(wait):
            wait = 1.0
            for worker in list(backend._pool._workers if backend._pool else ()):
                worker.process.kill()

    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("fail", [False, True])
def test_large_bytes_both_ways_block_nobody(connected: Any, fail: bool) -> None:
    backend = connected(workers=1, retries=0, on_failure="skip")
    backend.ask("recall", {0: {}})  # starting the worker is not what takes time here
    blob = bytes(range(250)) * 20_000
    for _ in range(2):  # the second time, state and vault are large as well
        failed = 0 if fail else -1
        messages = {client: {"blob": blob, "fail": client == failed} for client in range(4)}
        with at_most(60, backend):
            replies = backend.ask("bulky", messages, shared={"all": blob})
        assert list(replies) == [client for client in range(4) if client != failed]
        assert all(reply == {"blob": blob[::-1], "text": "x" * len(blob)} for reply in replies.values())
    assert [failure.message[:16] for failure in backend.failures] == ["ValueError: long"] * (2 if fail else 0)
    assert backend.vaults[1] == {"kept": blob}


def test_a_failure_ends_the_work_of_all_others_at_once(connected: Any) -> None:
    backend = connected()
    backend.ask("pull", {client: {} for client in range(4)}, shared={"w": torch.zeros(6)})
    with pytest.raises(ClientError, match="client 0"):
        backend.ask("spoil", {client: {} for client in range(4)}, shared={"fail": torch.tensor([0])})
    assert backend._pool is None
    # The next question starts new workers, and the state of before is still there.
    assert backend.ask("recall", {1: {}})[1]["rounds"].tolist() == [3]


def test_the_largest_clients_run_first(connected: Any) -> None:
    backend = connected((4, 10, 6, 10, 8), workers=1)
    assert backend._order({client: {} for client in (0, 1, 2, 3, 4)}) == [1, 3, 4, 2, 0]


@pytest.mark.parametrize(
    ("options", "text"),
    [({"workers": 0}, "workers"), ({"workers": 1.5}, "workers"), ({"retries": -1}, "retries"),
     ({"retries": True}, "retries")],
)  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Processes(**options)


def test_more_threads_than_cores_are_refused_before_anything_starts(connected: Any) -> None:
    cores = available_cores()
    with pytest.raises(ValueError, match=rf"{cores + 1} workers of 1 threads are {cores + 1} threads.*{cores} cores"):
        connected(workers=cores + 1)


@pytest.mark.skipif(available_cores() < 2, reason="needs two cores")
def test_threads_are_those_of_this_run_not_of_the_first_one(connected: Any) -> None:
    before = torch.get_num_threads()
    try:
        for threads, found in ((1, 1), (2, 2), (None, 2), (1, 1)):
            torch.set_num_threads(2)
            backend = connected(workers=1, threads=threads)
            reply = backend.ask("all_threads", {0: {}})[0]
            backend.close()
            assert (reply["pools"].tolist(), reply["torch"], reply["numba"]) == ([found], found, found)
    finally:
        torch.set_num_threads(before)


def test_a_gpu_is_refused(connected: Any) -> None:
    backend = connected()
    with pytest.raises(ValueError, match=r"accelerator is cuda"):
        backend.connect(backend.module, backend.data, seed=0, device=torch.device("cuda"), precision="32-true")


def test_a_module_that_cannot_travel_is_refused_at_once(connected: Any) -> None:
    backend = connected()
    module = backend.module
    module.own = lambda: None
    try:
        with pytest.raises(TypeError, match=r"client module ToyClient cannot be sent.*InProcess"):
            backend.connect(module, backend.data, seed=0, device=CPU, precision="32-true")
    finally:
        del module.own


@pytest.mark.parametrize("workers", [1, 2])
def test_a_feddcn_run_is_equal_to_one_in_process(feddcn: Any, dcn: Any, blobs: Any, workers: int) -> None:
    import fedclust

    found = []
    for backend in (InProcess(), Processes(min(workers, available_cores()))):
        result = fedclust.federate(feddcn(), dcn(), blobs(), rounds=2, backend=backend, progress=False)
        state = {name: digest(value) for name, value in result.entry["state"].items()}
        found.append((state, result.metrics, result.entry["clients"].keys(), result.summary["bytes"]))
    assert found[0] == found[1]


def test_umap_in_workers_is_that_of_this_process(feddcn: Any, dcn: Any, blobs: Any) -> None:
    import fedclust

    found = []
    for backend in (InProcess(), Processes(1)):
        result = fedclust.federate(
            feddcn(geometry_pretrain=0.2), dcn(), blobs(), rounds=1, backend=backend, progress=False
        )
        found.append({name: digest(value) for name, value in result.entry["state"].items()})
    assert found[0] == found[1]


def test_compiling_goes_on_after_the_threads_of_a_worker_are_set() -> None:
    script = "import numba; from fedclust.cores import set_threads; set_threads(1); print(numba.njit(lambda: 7)())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False, timeout=100
    )
    assert (done.stdout, done.returncode) == ("7\n", 0), done.stderr


SCRIPT = """
import multiprocessing, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
import fedclust, lightning_modules
from pytorch_lightning.callbacks import Callback

class Say(Callback):
    def on_train_epoch_end(self, trainer, module):
        print("round", flush=True)

LOCKS = []

class Locking(lightning_modules.Classifier):
    def configure_optimizers(self):
        LOCKS.append(multiprocessing.RLock())  # as tqdm and numba make them
        return super().configure_optimizers()

if __name__ == "__main__":
    data = fedclust.FederatedDataModule("digits", fedclust.Iid(4), seed=0)
    fedclust.federate(fedclust.FedAvg(), Locking("mlp"), data, rounds=10_000,
                      backend=fedclust.Processes(), progress=False, callbacks=[Say()])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_an_interrupted_run(tmp_path: Path, end: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"round\n"
        workers = psutil.Process(run.pid).children(recursive=True)
        assert sum(map(is_worker, workers)) == min(4, available_cores())
        run.send_signal(end)
        _, errors = run.communicate(timeout=60)
    assert b"leaked semaphore" not in errors
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any(name for name in segments()):
        time.sleep(0.1)
    assert segments() == set()
