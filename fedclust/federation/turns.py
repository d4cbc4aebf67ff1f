"""Clients that take turns: each runs until it waits for something that is done for all of them; one runs at a time."""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Job = TypeVar("Job")
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


class _CancelledError(BaseException):
    """Ends what a thread does from within, past `except Exception`."""


@dataclass(eq=False)
class _Stop(Generic[Ask]):
    """Where a job waits."""

    ask: Ask
    thread: threading.Thread
    go: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.go.acquire()


class Turns(Generic[Job, Ask, Answer]):
    """Does jobs in their order, and what they wait for when all that have not ended wait.

    A job that waits keeps its thread; the next one starts in another. The thread that stops or ends wakes the next one
    itself, and jobs that never wait follow each other in one thread. So nothing here or in the jobs needs to be safe
    against other threads.

    Args:
        work: Does one job; its second argument is called to wait, and returns when what it was given has been done.
        together: Does what all waiting jobs gave, in the order of the jobs.
        prepare: Called once in every new thread.
    """

    def __init__(
        self,
        work: Callable[[Job, Callable[[Ask], None]], Answer],
        together: Callable[[Sequence[Ask]], None],
        prepare: Callable[[], None],
    ) -> None:
        self._work, self._do_together, self._prepare = work, together, prepare
        self._jobs: deque[tuple[int, Job]] = deque()
        self._answers: dict[int, Answer] = {}
        self._waiting: deque[_Stop[Ask]] = deque()
        self._resuming: deque[_Stop[Ask]] = deque()
        self._idle: list[threading.Lock] = []
        self._threads: list[threading.Thread] = []
        self._back = threading.Lock()
        self._back.acquire()
        self._out = self._closing = False
        self._crash: BaseException | None = None

    def do(self, jobs: Sequence[Job]) -> list[Answer]:
        """Does these jobs; returns their answers in their order.

        Raises:
            BaseException: What ended a job's thread. Plain errors are for the job to catch.
        """
        self._answers = {}
        self._jobs.extend(enumerate(jobs))
        self._let_work()
        while self._waiting:
            self._do_together([stop.ask for stop in self._waiting])
            self._resuming, self._waiting = self._waiting, deque()
            self._let_work()
        return [self._answers[number] for number in range(len(jobs))]

    def close(self) -> None:
        """Ends all threads; a job that waits is ended where it waits, one that runs at its next stop."""
        self._closing = True
        if self._out:
            self._back.acquire()
        for stop in [*self._resuming, *self._waiting]:
            stop.go.release()
            stop.thread.join()
        for idle in self._idle:
            idle.release()
        for thread in self._threads:
            thread.join()

    def _let_work(self) -> None:
        self._out = True
        self._pass_on()
        self._back.acquire()
        if self._crash is not None:
            raise self._crash

    def _pass_on(self) -> None:
        """Wakes whoever is next; the caller then waits or ends."""
        if self._closing or self._crash is not None:
            self._give_back()
        elif self._resuming:
            self._resuming.popleft().go.release()
        elif not self._jobs:
            self._give_back()
        elif self._idle:
            self._idle.pop().release()
        else:
            self._start()

    def _start(self) -> None:
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(self._loop,), name="fedclust client", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: for the thread that waits for all, not for the one that stops
            self._crash = error
            self._give_back()
            return
        self._threads.append(thread)

    def _give_back(self) -> None:
        self._out = False
        self._back.release()

    def _loop(self) -> None:
        go = threading.Lock()
        try:
            self._prepare()
            while not self._closing:
                number, job = self._jobs.popleft()
                self._answers[number] = self._work(job, self._wait)
                go.acquire()
                self._idle.append(go)
                self._pass_on()
                go.acquire()
                go.release()
        except _CancelledError:
            pass
        except BaseException as error:  # raised again in the thread that waits for all
            self._crash = error
            self._pass_on()

    def _wait(self, ask: Ask) -> None:
        if self._closing:
            raise _CancelledError
        stop = _Stop(ask, threading.current_thread())
        self._waiting.append(stop)
        self._pass_on()
        stop.go.acquire()
        if self._closing:
            raise _CancelledError
