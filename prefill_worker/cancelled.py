"""Requests that were cancelled a moment ago: the answer to a take may come after the Cancel of what it took. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from pdq.wire.types import Pair

_MEMORY_S: Final = 10.0
"""Longer than an answer of the queue may take."""


class CancelMemory:
    def __init__(self) -> None:
        self._pairs: OrderedDict[str, tuple[Pair, float]] = OrderedDict()
        """By request id, the oldest first: the highest pair, and when it is forgotten."""

    def __len__(self) -> int:
        return len(self._pairs)

    def remember(self, request_id: str, pair: Pair, now: float) -> None:
        while self._pairs and next(iter(self._pairs.values()))[1] <= now:
            self._pairs.popitem(last=False)
        known, _ = self._pairs.pop(request_id, (pair, 0.0))
        self._pairs[request_id] = max(known, pair), now + _MEMORY_S

    def covers(self, request_id: str, pair: Pair, now: float) -> bool:
        """It, or a higher pair, was cancelled."""
        known, forget_at = self._pairs.get(request_id, (None, 0.0))
        return known is not None and pair <= known and now < forget_at
