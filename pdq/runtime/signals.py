"""How a process is asked to stop: the first SIGTERM or SIGINT starts the drain, the second one ends it at once.

Also `die_with_parent`: a child that outlives its parent would keep ports, leases and memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import structlog

T = TypeVar("T")
_PR_SET_PDEATHSIG: Final = 1
_log = structlog.get_logger(__name__)


class Drained(Exception):
    """Asked to stop before the process served: a clean end."""


class Drain:
    """Set once the process must take nothing new, finish what it holds, and end."""

    def __init__(self, on_force: Callable[[], None] = lambda: None) -> None:
        """`on_force` runs just before the second signal ends the process."""
        self._event = asyncio.Event()
        self._on_force = on_force
        self.reason = ""

    @property
    def is_requested(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str) -> None:
        """Idempotent; the first reason stays."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()
            _log.info("drain_requested", reason=reason)

    async def wait(self) -> None:
        await self._event.wait()

    async def unless_requested(self, work: Coroutine[Any, Any, T]) -> T:
        """For start-up: the result of `work`; when the drain comes first, `work` is cancelled and Drained raised."""
        working = asyncio.create_task(work)
        draining = asyncio.create_task(self.wait())
        try:
            await asyncio.wait([working, draining], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Drained(self.reason)
            return working.result()
        finally:
            for task in (working, draining):
                task.cancel()
            await asyncio.gather(working, draining, return_exceptions=True)

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Turns SIGTERM and SIGINT into a drain; the second signal ends the process with 1, without clean-up."""
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.is_requested:
            _log.warning("forced_exit", signal=number.name)
            self._on_force()
            os._exit(1)
        self.request(number.name)


def die_with_parent(parent_pid: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends `number` to this process when the thread that started it ends; kept across exec.

    `parent_pid`: whom to expect, for a parent that died before this call (default: the parent now). Linux only;
    elsewhere it does nothing.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except AttributeError:
        return
    expected = os.getppid() if parent_pid is None else parent_pid
    if prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != expected:
        os.kill(os.getpid(), number)
