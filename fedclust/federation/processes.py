"""`Processes`: clients run in worker processes, several at a time."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Generator, Mapping
from typing import Literal

import torch

from fedclust.checks import positive_int
from fedclust.cores import available_cores
from fedclust.federation.backend import Backend
from fedclust.federation.client import ClientModule
from fedclust.federation.errors import Failure
from fedclust.federation.message import Message
from fedclust.federation.parcels import open_outcome
from fedclust.federation.pool import Pool, Worker
from fedclust.federation.resident import ClientSource, Outcome
from fedclust.federation.shared_memory import SharedClients, picklable
from fedclust.federation.worker import Setup, torch_settings

_log = logging.getLogger("fedclust")
# Within so many clients per worker the largest run first; more would hold back too many replies of small ids.
_WINDOW = 16


class Processes(Backend):
    """Runs clients in worker processes, each with one resident client module and its own threads.

    Equal to `InProcess` bit for bit on CPU, at equal threads per worker. Messages, client state and the clients' rows
    travel through shared memory. Within a trip the largest clients run first, on whichever worker is free. State and
    secrets stay with this process, so a worker that dies loses nothing: its clients are asked again in a new worker.

    Workers start with the first question, a few seconds that later rounds do not have, and end with the run. They are
    new processes that import what they need, no copies of this one: a script needs the usual
    `if __name__ == "__main__":`, and the client's class must be importable. They cannot start processes of their own:
    no `DataLoader` with workers and no `multiprocessing` in a client's code.

    Args:
        workers: Number of worker processes; "auto" takes the cores of this machine divided by `threads`.
        threads: Threads of every worker; None gives each as many as torch has in this process.
        on_failure: "raise" or "skip"; see `Backend`. A client whose worker died twice counts as failed.
        state_budget_mb: Client state kept in memory; see `Backend`.
        retries: How often a client is asked again in one trip after its worker died while it worked for this client.

    Raises:
        ValueError: For numbers out of range.
    """

    def __init__(
        self,
        workers: int | Literal["auto"] = "auto",
        threads: int | None = 1,
        on_failure: Literal["raise", "skip"] = "raise",
        state_budget_mb: float | None = None,
        retries: int = 1,
    ) -> None:
        super().__init__(threads, on_failure, state_budget_mb)
        if workers != "auto":
            positive_int("workers", workers)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries must be a whole number of at least 0, not {retries!r}")
        self.workers, self.retries = workers, retries
        self._pool: Pool | None = None
        self._trips = itertools.count()

    def connect(
        self, module: ClientModule, data: ClientSource, *, seed: int, device: torch.device, precision: str
    ) -> None:
        """See `Backend.connect`.

        Raises:
            ValueError: If the device is no CPU, or `workers` times `threads` is more than this machine has cores.
            TypeError: If the client module cannot be sent to another process.
        """
        if device.type != "cpu":
            raise ValueError(
                f"backend Processes runs clients on the CPU, the trainer's accelerator is {device.type}; use "
                "fedclust.InProcess or fedclust.Vectorised on a GPU"
            )
        cores, wanted = available_cores(), self.n_workers * (self.threads or 1)
        if self.workers != "auto" and wanted > cores:
            raise ValueError(
                f"backend Processes: {self.workers} workers of {self.threads or 1} threads are {wanted} threads, this "
                f"machine gives {cores} cores; use workers=auto or at most {max(1, cores // (self.threads or 1))}"
            )
        self.close()
        super().connect(module, data, seed=seed, device=device, precision=precision)
        picklable(module, f"the client module {type(module).__name__}")

    def use(self, device: torch.device, precision: str) -> None:
        """See `Backend.use`."""
        if (device, precision) != (self.resident.device, self.resident.precision):
            self.close()
        super().use(device, precision)

    @property
    def n_workers(self) -> int:
        """Number of worker processes."""
        if self.workers == "auto":
            return max(1, available_cores() // (self.threads or 1))
        return int(self.workers)

    @property
    def is_open(self) -> bool:
        """Whether the workers run."""
        return self._pool is not None

    def open(self) -> None:
        """Starts the workers, unless they run."""
        self._ready()

    def close(self) -> None:
        """Ends the workers; the next question starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def run(self, actions: list[str], messages: Mapping[int, Message], shared: Message) -> Generator[Outcome]:
        """Runs the clients on the workers; outcomes come as they are ready."""
        pool = self._ready()
        common = (next(self._trips), pool.common.write(shared))
        waiting, tries = deque(self._order(messages)), dict.fromkeys(messages, 0)
        done = False
        try:
            while waiting or pool.busy():
                for worker in pool.with_room():
                    if waiting:
                        client = waiting.popleft()
                        worker.send(self.trip(client, actions, dict(messages[client])), common)
                for worker in pool.wait():
                    report = worker.receive()
                    if report is not None:
                        yield open_outcome(report, worker.reader, f"slot {worker.slot_of(report.number)}")
                        continue
                    first, *queued = self._lost(pool, worker)
                    waiting.extendleft(reversed(queued))  # not begun yet, so no fault of theirs
                    tries[first] += 1
                    if tries[first] <= self.retries:
                        waiting.appendleft(first)
                    else:
                        yield self._given_up(first, actions, worker)
            done = True
        finally:
            if not done:
                self.close()

    def _ready(self) -> Pool:
        if self._pool is None:
            resident = self.resident
            setup = Setup(
                module=picklable(resident.module, f"the client module {type(resident.module).__name__}"),
                data=SharedClients(resident.data),
                seed=resident.seed,
                precision=resident.precision,
                threads=self.threads or torch.get_num_threads(),
                settings=torch_settings(),
            )
            self._pool = Pool(min(self.n_workers, resident.data.n_clients), setup)
        return self._pool

    def _order(self, messages: Mapping[int, Message]) -> list[int]:
        """Clients in the order in which they are sent out: by id, the largest first within each window."""
        clients, window = list(messages), _WINDOW * self.n_workers
        sizes = {client: len(self.data.client(client).train) for client in clients}
        ordered: list[int] = []
        for start in range(0, len(clients), window):
            ordered += sorted(clients[start : start + window], key=lambda client: (-sizes[client], client))
        return ordered

    def _lost(self, pool: Pool, worker: Worker) -> list[int]:
        """The clients that a dead worker held; a new worker takes its place."""
        clients = worker.held()
        _log.warning(
            "worker %d died (%s) in round %d while it held clients %s", worker.number, worker.end(), self.round, clients
        )
        pool.replace(worker)
        return clients

    def _given_up(self, client: int, actions: list[str], worker: Worker) -> Outcome:
        times = "once" if not self.retries else f"{self.retries + 1} times"
        text = f"its worker process died ({worker.end()}), {times} in this trip"
        return Outcome(client, {}, {}, failure=Failure(client, self.round, actions[0], text, ""))
