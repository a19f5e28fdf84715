"""Who was told Busy: they are told Room, once, when blocks come back."""

from __future__ import annotations

from collections import deque
from typing import Final

from broker.links import Reply

from broker.messages import Room

_MAX_WAITERS: Final = 1024  # a worker that was forgotten here asks again by itself after its park_retry_s


class RoomWaiters:
    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._waiters: deque[Reply] = deque(maxlen=_MAX_WAITERS)

    def add(self, reply: Reply) -> None:
        self._waiters.append(reply)

    def tell(self, free_tokens: int) -> None:
        """All of them: they ask again, and placement decides who comes first."""
        while self._waiters:
            self._waiters.popleft()(Room(worker=self._worker_id, free_tokens=free_tokens))
