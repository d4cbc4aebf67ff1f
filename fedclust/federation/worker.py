"""What runs inside a worker process of `Processes`: a resident module that works through the trips it is sent."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedclust.cores import set_threads
from fedclust.federation.message import Message
from fedclust.federation.parcels import SLOTS, Order, Report, open_trip, pack_outcome
from fedclust.federation.resident import Resident
from fedclust.federation.shared_memory import Reader, Segment, SharedClients


@dataclass(frozen=True)
class Setup:
    """What a worker needs before its first trip.

    Attributes:
        module: The client module, pickled.
        data: All clients' rows, in shared memory.
        seed: The run's seed.
        precision: Lightning's name of the precision.
        threads: Threads of torch and of all other libraries.
        settings: Settings of torch that change results.
        memory: Start of the names of the memory that the worker writes into; each worker has its own.
    """

    module: bytes
    data: SharedClients
    seed: int
    precision: str
    threads: int
    settings: dict[str, Any]
    memory: str = ""


def torch_settings() -> dict[str, Any]:
    """Settings of torch that change results and are no environment variables."""
    return {
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
    }


def out_prefixes(memory: str) -> list[str]:
    """Starts of the names of a worker's places for outcomes."""
    return [f"{memory}o{slot}" for slot in range(SLOTS)]


def work(connection: Connection[Any, Any]) -> None:
    """Main function of a worker: setups and orders come in, reports go out, until None or the end of the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    if "fork" in multiprocessing.get_all_start_methods():
        # Starts nothing, as workers are daemons, but decides that the locks of numba and tqdm are files without a name,
        # which a worker that is ended cannot leave behind.
        multiprocessing.set_start_method("fork", force=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    desk = _Desk()
    try:
        while (received := connection.recv()) is not None:
            connection.send(desk.handle(received))
    except (EOFError, OSError):
        pass  # the parent is gone or has closed the line
    finally:
        desk.close()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Desk:
    """A worker's memory between two messages."""

    def __init__(self) -> None:
        self._resident: Resident | None = None
        self._reader = Reader()
        self._out: list[Segment] = []
        self._shared: tuple[int, Message] = (-1, {})

    def handle(self, received: Setup | Order) -> Report | str:
        if isinstance(received, Setup):
            try:
                self._set_up(received)
            except Exception:  # reported by the parent, which asked
                return traceback.format_exc()
            return ""
        return self._do(received)

    def close(self) -> None:
        self._reader.close()
        for segment in self._out:
            segment.close()

    def _set_up(self, setup: Setup) -> None:
        # Here and not by variables at the start: the process that workers fork from has loaded the libraries already.
        set_threads(setup.threads)
        torch.set_num_threads(setup.threads)
        torch.set_float32_matmul_precision(setup.settings["matmul"])
        torch.use_deterministic_algorithms(setup.settings["deterministic"])
        torch.set_default_dtype(setup.settings["dtype"])
        module = pickle.loads(setup.module)
        self._resident = Resident(module, setup.data, setup.seed, torch.device("cpu"), setup.precision)
        self._shared = (-1, {})
        self._out = [Segment(prefix) for prefix in out_prefixes(setup.memory)]

    def _do(self, order: Order) -> Report:
        assert self._resident is not None
        if order.shared[0] != self._shared[0]:
            self._shared = (order.shared[0], self._reader.read(order.shared[1], "shared"))
        slot = order.number % SLOTS
        own = self._reader.read(order.own, f"own {slot}")
        outcome = self._resident.work(open_trip(order, self._shared[1], own))
        return pack_outcome(order.number, outcome, self._out[slot])
