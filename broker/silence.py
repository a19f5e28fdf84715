"""Workers that did not answer a moment ago. Pure.

Each question to one of them costs its whole time-out, until its registry key is gone. So others are asked meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from broker.base import WorkerRecord


class Silence:
    """`now` is in seconds of any steady clock."""

    def __init__(self, silent_s: float) -> None:
        """A worker counts as silent for so long."""
        self._silent_s = silent_s
        self._until: dict[str, float] = {}

    def note(self, worker_id: str, now: float) -> None:
        """It did not answer."""
        self._until[worker_id] = now + self._silent_s

    def heard_of(self, workers: Sequence[WorkerRecord], now: float) -> list[WorkerRecord]:
        """Without the silent ones, unless all are."""
        self._until = {worker_id: until for worker_id, until in self._until.items() if until > now}
        return [worker for worker in workers if worker.worker_id not in self._until] or list(workers)
