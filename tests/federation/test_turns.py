"""Turns: order, one at a time, and an end in every case."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from fedclust.federation.turns import Turns

Wait = Callable[[str], None]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """The function's result; fails if it takes longer, as a deadlock would."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def run(work: Callable[[int, Wait], Any], together: Callable[[Sequence[str]], None], *batches: list[int]) -> list[Any]:
    def do() -> list[Any]:
        turns: Turns[int, str, Any] = Turns(work, together, lambda: None)
        try:
            return [turns.do(batch) for batch in batches]
        finally:
            turns.close()

    return within(20, do)


def test_jobs_run_in_order_and_meet_at_every_stop() -> None:
    events: list[str] = []

    def work(job: int, wait: Wait) -> int:
        for stop in range(job):
            events.append(f"{job}.{stop}")
            wait(f"{job}.{stop}")
        events.append(f"{job} ends")
        return job * job

    def together(asks: Sequence[str]) -> None:
        events.append("+".join(asks))

    assert run(work, together, [2, 0, 3], [1]) == [[4, 0, 9], [1]]
    assert events == [
        "2.0", "0 ends", "3.0", "2.0+3.0", "2.1", "3.1", "2.1+3.1", "2 ends", "3.2", "3.2", "3 ends",
        "1.0", "1.0", "1 ends",
    ]  # fmt: skip


def test_only_one_runs_at_a_time() -> None:
    inside, most = [0], [0]

    def work(job: int, wait: Wait) -> None:
        for _ in range(3):
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            for _ in range(20000):  # long enough for the interpreter to switch threads, if another one could run
                pass
            inside[0] -= 1
            wait("")

    run(work, lambda asks: None, list(range(8)), list(range(8)))
    assert most == [1]


def test_jobs_that_never_wait_share_one_thread() -> None:
    threads: set[int] = set()
    run(lambda job, wait: threads.add(threading.get_ident()), lambda asks: None, list(range(20)), list(range(20)))
    assert len(threads) == 1


def test_what_ends_a_thread_is_raised_and_ends_all_others() -> None:
    unwound: list[int] = []

    def work(job: int, wait: Wait) -> None:
        try:
            wait("")
            if job == 1:
                raise SystemExit("enough")
            wait("")
        finally:
            unwound.append(job)

    with pytest.raises(SystemExit, match="enough"):
        run(work, lambda asks: None, [0, 1, 2])
    assert sorted(unwound) == [0, 1, 2]


def test_an_interruption_of_what_is_done_together_ends_all() -> None:
    unwound: list[int] = []

    def work(job: int, wait: Wait) -> None:
        try:
            wait("")
        finally:
            unwound.append(job)
            try:
                wait("again, while being ended")
            except BaseException as error:
                unwound.append(type(error).__name__ == "_CancelledError")

    def together(asks: Sequence[str]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(work, together, [0, 1, 2])
    assert unwound == [0, True, 1, True, 2, True]


def test_ctrl_c_while_a_job_runs_ends_all() -> None:
    def late(number: int, frame: Any) -> None:
        raise TimeoutError("it hangs")

    def work(job: int, wait: Wait) -> None:
        if job == 1:
            _thread.interrupt_main()
        time.sleep(0.05)
        wait("")

    turns: Turns[int, str, Any] = Turns(work, lambda asks: None, lambda: None)
    before = signal.signal(signal.SIGALRM, late)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.alarm(20)
    try:
        with pytest.raises(KeyboardInterrupt):
            turns.do([0, 1, 2])
        turns.close()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, handler)


def test_too_many_threads_are_an_error_and_no_deadlock(monkeypatch: Any) -> None:
    start = threading.Thread.start

    def limited(self: threading.Thread) -> None:
        if self.name == "fedclust client" and len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    started: list[threading.Thread] = []
    turns: Turns[int, str, Any] = Turns(lambda job, wait: wait(""), lambda asks: None, lambda: None)

    def do() -> None:
        monkeypatch.setattr(threading.Thread, "start", limited)
        try:
            turns.do([0, 1, 2])
        finally:
            turns.close()

    with pytest.raises(RuntimeError, match="can't start new thread"):
        within(20, do)


def test_closing_without_work_and_after_jobs_were_left_waiting() -> None:
    assert run(lambda job, wait: job, lambda asks: None) == []
    assert run(lambda job, wait: job, lambda asks: None, []) == [[]]
