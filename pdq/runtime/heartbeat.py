"""Calls an async function at a steady pace; a failure is logged once and tried again at the next beat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn

import structlog

_log = structlog.get_logger(__name__)


async def beat_forever(beat: Callable[[], Awaitable[None]], *, heartbeat_s: float, timeout_s: float) -> NoReturn:
    """Ends only by cancellation. Each beat has `timeout_s`; the pace is kept, missed beats are not made up for."""
    loop = asyncio.get_running_loop()
    failures = 0
    due = loop.time()
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                await beat()
        except Exception as error:  # noqa: BLE001 - whatever is wrong, the next beat may be right again
            failures += 1
            if failures == 1:
                _log.warning("heartbeat_failed", error=repr(error))
        else:
            if failures:
                _log.info("heartbeat_resumed", failed_beats=failures)
            failures = 0
        due = max(due + heartbeat_s, loop.time())
        await asyncio.sleep(due - loop.time())
