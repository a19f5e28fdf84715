"""Tokens per second of each worker, from the growing counts in its heartbeats. Pure: `now_s` comes in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from broker.base import WorkerRecord

_WINDOW_S: Final = 5.0
"""Heartbeats come once a second: over less than a few of them a rate would jump."""


class Rates:
    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}

    def observe(self, workers: Iterable[WorkerRecord], now_s: float) -> dict[str, float]:
        """Rates by worker id; a worker that was seen once has none."""
        seen = {worker.worker_id: self._seen.get(worker.worker_id, deque()) for worker in workers}
        rates: dict[str, float] = {}
        for worker in workers:
            counts = seen[worker.worker_id]
            counts.append((now_s, worker.done_tokens))
            while now_s - counts[0][0] > _WINDOW_S:
                counts.popleft()
            (since_s, before), (_, after) = counts[0], counts[-1]
            if now_s > since_s:
                rates[worker.worker_id] = (after - before) / (now_s - since_s)
        self._seen = seen
        return rates
