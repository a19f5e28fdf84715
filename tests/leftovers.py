"""What a process still holds: objects of given kinds, asyncio tasks, file descriptors, threads."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable

LIMIT_S = 40.0


def held(*kinds: type) -> Counter[str]:
    """Of this process, after a collection."""
    gc.collect()
    types = (
        type(thing) for thing in gc.get_objects()
    )  # isinstance would ask each object for its __class__: torch warns
    found: Counter[str] = Counter(kind.__name__ for kind in types if issubclass(kind, kinds))
    found["tasks"] = len(asyncio.all_tasks())
    found["threads"] = threading.active_count()
    found["fds"] = len(os.listdir("/proc/self/fd"))
    return found


async def no_more_than(before: Counter[str], measure: Callable[[], Counter[str]]) -> None:
    """Waits until nothing is more than before; fails with what is."""

    async def more() -> Counter[str]:
        return measure() - before

    await _nothing(more)


async def _nothing(more: Callable[[], Awaitable[Counter[str]]]) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LIMIT_S
    while left := await more():
        assert loop.time() < deadline, f"still there: {dict(left)}"
        await asyncio.sleep(0.05)
