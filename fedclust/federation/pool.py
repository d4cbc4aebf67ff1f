"""The worker processes of one run, seen from the process that started them."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import signal
import sys
import weakref
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from fedclust.federation.errors import FederationError
from fedclust.federation.parcels import SLOTS, Order, Report, pack_trip
from fedclust.federation.resident import Trip
from fedclust.federation.shared_memory import Reader, Segment, Written, remove_segment
from fedclust.federation.worker import Setup, out_prefixes, work

_PRELOADED = ["fedclust.federation.worker", "lightning_modules.dcn", "lightning_modules.pa_cfl"]
_START_SECONDS = 300.0
_END_SECONDS = 2.0


class WorkerError(FederationError):
    """A worker process could not start."""


def _context() -> Any:
    """How workers start: forked from a clean process that has imported all once, where the system can do that."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def script_hint() -> str:
    """What most often keeps a new process from starting, as it imports the script that this one runs."""
    if getattr(sys.modules["__main__"], "__file__", None) == "<stdin>":
        return "a script from standard input cannot start processes: save it as a file"
    return 'a script needs `if __name__ == "__main__":`'


class Worker:
    """One worker process, and what was sent to it.

    Args:
        number: Number of the worker, for messages.
        setup: What it starts from.
    """

    def __init__(self, number: int, setup: Setup) -> None:
        self.number = number
        self.reader = Reader()
        self._memory = f"fc{secrets.token_hex(6)}"
        self._segments = [Segment(f"{self._memory}i{slot}") for slot in range(SLOTS)]
        self._orders: dict[int, int] = {}
        self._next = 0
        context = _context()
        ours, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), name=f"fedclust-worker-{number}", daemon=True)
        self.process.start()
        theirs.close()
        self.connection: Connection[Any, Any] = ours
        self.connection.send(replace(setup, memory=self._memory))

    def confirm(self) -> None:
        """Waits until the worker is ready.

        Raises:
            WorkerError: If it is not; says why.
        """
        failed = "" if self.connection.poll(_START_SECONDS) else f"it did not answer in {_START_SECONDS:.0f} s"
        if not failed:
            try:
                failed = self.connection.recv()
            except (EOFError, OSError):
                self.process.join(_END_SECONDS)
                failed = f"it ended at once ({self.end()}); {script_hint()}"
        if failed:
            raise WorkerError(f"worker process {self.number} could not start: {failed.strip().splitlines()[-1]}")

    @property
    def has_room(self) -> bool:
        """Whether a client can be sent."""
        return len(self._orders) < SLOTS

    def held(self) -> list[int]:
        """The clients that were sent and not answered."""
        return list(self._orders.values())

    def slot_of(self, number: int) -> int:
        """Which of the places an order's message has."""
        return number % SLOTS

    def send(self, trip: Trip, shared: tuple[int, Written]) -> None:
        """Sends one client; a dead worker takes it too, and `receive` then tells."""
        number, self._next = self._next, self._next + 1
        self._orders[number] = trip.client
        order: Order = pack_trip(number, trip, shared, self._segments[self.slot_of(number)])
        with contextlib.suppress(OSError):
            self.connection.send(order)

    def receive(self) -> Report | None:
        """The next report; None from a worker that died."""
        try:
            report: Report = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_END_SECONDS)
            return None
        del self._orders[report.number]
        return report

    def end(self) -> str:
        """How the process ended, in words."""
        code = self.process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def close(self, *, gently: bool) -> None:
        """Ends the process; one that works is killed."""
        if gently and not self._orders:
            with contextlib.suppress(OSError):
                self.connection.send(None)
            self.process.join(_END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()
        self.reader.close()
        for segment in self._segments:
            segment.close()
        for prefix in out_prefixes(self._memory):
            remove_segment(prefix)


class Pool:
    """All workers of a run, and the memory of what all clients are sent.

    Args:
        size: Number of workers.
        setup: What they start from.
    """

    def __init__(self, size: int, setup: Setup) -> None:
        self._setup = setup
        self.common = Segment()
        self._workers: list[Worker] = []
        # Also called at the end of the process, before the memory's own clean-up.
        self._finalizer = weakref.finalize(self, _close_all, self._workers, self.common)
        try:
            for number in range(size):
                self._workers.append(Worker(number, setup))
            for worker in self._workers:
                worker.confirm()
        except BaseException:
            self.close()
            raise

    def busy(self) -> bool:
        """Whether any worker has a client."""
        return any(worker.held() for worker in self._workers)

    def with_room(self) -> list[Worker]:
        """Workers that a client can be sent to, idle ones first, one entry per free place."""
        free = [(len(worker.held()), worker) for worker in self._workers if worker.has_room]
        entries = [(place, worker) for held, worker in free for place in range(held, SLOTS)]
        return [worker for _, worker in sorted(entries, key=lambda entry: (entry[0], entry[1].number))]

    def wait(self) -> list[Worker]:
        """Workers with something to tell; blocks until there is one."""
        ready = set(map(id, wait([worker.connection for worker in self._workers if worker.held()])))
        return [worker for worker in self._workers if id(worker.connection) in ready]

    def replace(self, worker: Worker) -> None:
        """Puts a new process in the place of a dead one."""
        worker.close(gently=False)
        fresh = Worker(worker.number, self._setup)
        self._workers[self._workers.index(worker)] = fresh
        fresh.confirm()

    def close(self) -> None:
        """Ends all workers and gives their memory back."""
        self._finalizer()


def _close_all(workers: list[Worker], common: Segment) -> None:
    busy = any(worker.held() for worker in workers)
    for worker in workers:
        worker.close(gently=not busy)
    workers.clear()
    common.close()
