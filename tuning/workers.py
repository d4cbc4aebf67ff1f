"""Trials in several processes over one storage; the parent only watches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedclust.cores import available_cores, thread_variables
from fedclust.federation.pool import script_hint
from tuning.blueprint import Blueprint
from tuning.ledger import Ledger, Settings, worker_of
from tuning.storage import StorageName

_POLL = 0.3
_PATIENCE = 15.0
_DEATHS_PER_WORKER = 3


class WorkerError(RuntimeError):
    """Workers could not go on."""


@dataclass(frozen=True)
class Order:
    """What a worker needs to know.

    Attributes:
        name: The study's name.
        storage: Where trials are kept.
        directory: The study's directory.
        blueprint: What all trials start from.
        settings: How trials are drawn and stopped.
        total: How many trials there shall be.
        threads: Threads for each worker.
    """

    name: str
    storage: StorageName
    directory: Path
    blueprint: Blueprint
    settings: Settings
    total: int
    threads: int

    def ledger(self) -> Ledger:
        """The study's book, opened in this process."""
        return Ledger(self.name, self.storage, self.directory, self.blueprint, self.settings)


def thread_share(jobs: int) -> int:
    """Threads for each of so many workers, at least one."""
    return max(1, available_cores() // jobs)


class Crew:
    """The workers of a study.

    Args:
        order: What they do.
        ledger: The parent's own book.
        watch: Called several times a second, to show progress.
    """

    def __init__(self, order: Order, ledger: Ledger, watch: Callable[[], None]) -> None:
        self.order, self.ledger, self.watch = order, ledger, watch
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._deaths = 0

    def run(self) -> None:
        """Starts the workers and waits until they are done; none is left when it returns or raises.

        Raises:
            WorkerError: If one reports an error, dies before its first trial, or too many die.
            KeyboardInterrupt: On Ctrl-C, after the workers marked their trials.
        """
        try:
            for _ in range(self.order.settings.jobs):
                self._start()
            while self._workers:
                wait([process.sentinel for process, _ in self._workers], timeout=_POLL)
                self.watch()
                for worker in [entry for entry in self._workers if not entry[0].is_alive()]:
                    self._workers.remove(worker)
                    self._ended(*worker)
        finally:
            self._stop()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe(duplex=False)
        with thread_variables(self.order.threads):
            process = context.Process(target=worker_main, args=(self.order, theirs), name="fedclust tune worker")
            process.start()
        theirs.close()
        self._workers.append((process, mine))

    def _ended(self, process: BaseProcess, mine: Connection) -> None:
        """One worker is gone: done, failed, or dead."""
        process.join()
        said = _last_word(mine)
        if process.exitcode == 0:
            return
        if said is not None:
            raise WorkerError(said)
        if process.exitcode == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        lost = self.ledger.reclaim()
        code = process.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if not any(worker_of(trial).get("pid") == process.pid for trial in self.ledger.trials()):
            hint = "fewer --jobs need less memory" if code < 0 else script_hint()
            raise WorkerError(f"a worker died before its first trial ({how}); {hint}")
        self._deaths += 1
        if self._deaths > _DEATHS_PER_WORKER * self.order.settings.jobs:
            raise WorkerError(f"{self._deaths} workers died ({how} at last, in trials {lost}); the study stops here")
        self._start()

    def _stop(self) -> None:
        """Ends what still runs: politely, then firmly."""
        for send in (_interrupt, lambda process: process.terminate(), lambda process: process.kill()):
            running = [process for process, _ in self._workers if process.is_alive()]
            for process in running:
                send(process)
            deadline = time.monotonic() + _PATIENCE
            for process in running:
                process.join(max(0.0, deadline - time.monotonic()))
        if self._workers:
            self._workers = []
            self.ledger.reclaim()


def worker_main(order: Order, parent: Connection) -> None:
    """A worker's whole life; its exit code is 0, 1 (it said why) or 130."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C in a terminal reaches the parent only, which then asks once
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_follow_parent, daemon=True).start()
    import torch

    torch.set_num_threads(order.threads)
    from fedclust.launch.errors import explain
    from tuning.engine import work
    from tuning.trial import Runner

    try:
        ledger = order.ledger()
        work(ledger, Runner(order.blueprint, order.directory), order.total, lambda task, number: None)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if os.environ.get("FEDCLUST_DEBUG", "0") not in ("", "0"):
            import traceback

            traceback.print_exc()
        parent.send(explain(error))
        sys.exit(1)


def _follow_parent() -> None:
    """Ends this process when its parent is gone, so that nothing keeps running behind a killed study."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_PATIENCE)
    os._exit(1)


def _interrupt(process: BaseProcess) -> None:
    if process.pid is not None:
        os.kill(process.pid, signal.SIGINT)


def _last_word(connection: Connection) -> str | None:
    try:
        said: Any = connection.recv() if connection.poll() else None
    except (EOFError, OSError):
        said = None
    connection.close()
    return said
