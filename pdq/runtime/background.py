"""Work beside the main loop: tasks with an owner, whose crash is logged and never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

import structlog

log = structlog.get_logger(__name__)


class Background:
    """Owns the tasks that it spawned; `close` cancels what still runs."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str | None = None) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def settled(self, timeout_s: float) -> None:
        """Waits for what runs now, at most so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background_task_crashed", task=task.get_name(), error=repr(error), exc_info=error)


async def every(pace_s: float, work: Callable[[], Awaitable[None]], *, name: str) -> NoReturn:
    """Does `work` again and again; what it raises is logged. Ends only by cancellation."""
    while True:
        await asyncio.sleep(pace_s)
        try:
            await work()
        except Exception as error:  # a consume loop: the next turn may be right again
            log.exception("periodic_work_failed", work=name, error=repr(error))
