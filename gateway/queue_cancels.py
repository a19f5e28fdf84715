"""Takes requests out of the queue that nobody waits for any more; what the queue did not hear is said again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from broker.base import PrefillQueue
from broker.errors import QueueUnavailable
from pdq.runtime.background import Background

_RETRY_MIN_S: Final = 0.25
_RETRY_MAX_S: Final = 2.0
_AT_ONCE: Final = 64
_MAX_OWED: Final = 10_000
"""Beyond it the oldest is left to whoever takes the job: its decode worker is told Gone."""
log = structlog.get_logger(__name__)

_Key = tuple[str, int]


class QueueCancels:
    """Right in every state, before the enqueue too: a cancel may be said again at any time."""

    def __init__(
        self,
        queue: PrefillQueue,
        background: Background,
        *,
        timeout_s: float,
        give_up_s: float,
        on_owner: Callable[[str, str, int], None],
        max_owed: int = _MAX_OWED,
    ) -> None:
        """`on_owner(worker, request_id, gen)`: this prefill worker still holds the job that was cancelled.

        `give_up_s`: the longest life of a job; after it the queue has ended it by itself.
        """
        self._queue = queue
        self._background = background
        self._timeout_s = timeout_s
        self._give_up_s = give_up_s
        self._on_owner = on_owner
        self._max_owed = max_owed
        self._owed: dict[_Key, float] = {}
        """What the queue has not heard, oldest first; until when it is worth saying."""

    def __len__(self) -> int:
        """Cancels that the queue has not heard."""
        return len(self._owed)

    def cancel(self, request_id: str, gen: int) -> None:
        self._background.spawn(self._first((request_id, gen)))

    async def _first(self, key: _Key) -> None:
        if await self._try(key):
            return
        is_retrying = bool(self._owed)
        if len(self._owed) >= self._max_owed:
            request_id, gen = next(iter(self._owed))
            del self._owed[request_id, gen]
            log.warning("queue_cancel_given_up", request_id=request_id, gen=gen)
        self._owed[key] = asyncio.get_running_loop().time() + self._give_up_s
        if not is_retrying:
            await self._retry()

    async def _retry(self) -> None:
        """Until nothing is owed."""
        delay_s = _RETRY_MIN_S
        while self._owed:
            await asyncio.sleep(delay_s)
            now = asyncio.get_running_loop().time()
            keys = list(self._owed)[:_AT_ONCE]
            are_heard = await asyncio.gather(*(self._try(key) for key in keys))
            for key, is_heard in zip(keys, are_heard, strict=True):
                if is_heard or self._owed.get(key, 0.0) <= now:
                    self._owed.pop(key, None)
            delay_s = 0.0 if all(are_heard) else min(max(2 * delay_s, _RETRY_MIN_S), _RETRY_MAX_S)

    async def _try(self, key: _Key) -> bool:
        """False: the queue may not have heard it."""
        request_id, gen = key
        try:
            async with asyncio.timeout(self._timeout_s):
                owner = await self._queue.cancel(request_id, gen)
        except (QueueUnavailable, TimeoutError) as error:
            say = log.debug if self._owed else log.warning  # once per trouble
            reason = str(error) or f"no answer within {self._timeout_s} s"
            say("queue_cancel_failed", request_id=request_id, gen=gen, error=reason)
            return False
        if owner:
            self._on_owner(owner, request_id, gen)
        return True
