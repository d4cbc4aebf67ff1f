"""Clients in threads of their own that take turns: only one runs at a time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

import torch

from fedclust.federation.client import ClientModule
from fedclust.federation.context import ClientContext
from fedclust.federation.local import LocalFit, LocalWork
from fedclust.federation.resident import Outcome, Together
from fedclust.federation.together import Member


class _CancelledError(BaseException):
    """Ends a client's thread from within, past `except Exception`."""


class Turn:
    """One client's trip, which stops at every local fit until it is told to go on.

    Args:
        work: Does the trip; its argument is the hook that local fits are handed to.
        member: Makes the waiting member of a local fit.
        device: Where the work runs.
    """

    def __init__(
        self,
        work: Callable[[Together], Outcome],
        member: Callable[[ClientModule, ClientContext, LocalWork], Member],
        device: torch.device,
    ) -> None:
        self._work, self._member, self._device = work, member, device
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._cancelled = False
        self._crash: BaseException | None = None
        self.waiting: Member | None = None
        self.outcome: Outcome | None = None

    def go(self) -> None:
        """Lets the client work until its next local fit or the end of its trip.

        Raises:
            BaseException: What ended the client's thread, if it is no plain error.
        """
        self.waiting = None
        if self._thread is None:
            context = contextvars.copy_context()
            self._thread = threading.Thread(target=context.run, args=(self._run,), name="fedclust client", daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        if self._crash is not None:
            raise self._crash

    def cancel(self) -> None:
        """Ends the thread at its next stop, if it has not ended; returns once it has."""
        if self._thread is None:
            return
        self._cancelled = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self.outcome = self._work(self._together)
        except _CancelledError:
            pass
        except BaseException as error:  # raised again in the thread that waits
            self._crash = error
        finally:
            self._back.release()

    def _together(self, module: ClientModule, ctx: ClientContext, work: LocalWork) -> LocalFit:
        self.waiting = member = self._member(module, ctx, work)
        self._back.release()
        self._go.acquire()
        if self._cancelled:
            raise _CancelledError
        if member.error is not None:
            raise member.error
        assert member.result is not None
        return member.result
