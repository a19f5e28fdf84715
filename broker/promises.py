"""What this process has promised to decode workers and their records do not count yet. Pure.

A promise counts from the moment a worker is asked. When the worker has accepted, its answer says when, by the worker's
own clock; the promise ends with the first record of that worker that is no older. Not with the next look at the
registry: a record may have been written just before the worker was asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from broker.base import WorkerRecord


class Promise:
    """Use as a context manager around the question; withdrawn at its end, unless `keep` was called."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.accepted_ms: int | None = None
        """By the worker's clock; None: not answered yet."""
        self.is_over = False

    def keep(self, clock_ms: int) -> None:
        """The worker has accepted, at this time of its clock."""
        self.accepted_ms = clock_ms

    def __enter__(self) -> Promise:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over = self.accepted_ms is None


class Promises:
    def __init__(self) -> None:
        self._promises: dict[str, list[Promise]] = {}
        """By worker id."""

    def make(self, worker_id: str, tokens: int) -> Promise:
        promise = Promise(tokens)
        self._promises.setdefault(worker_id, []).append(promise)
        return promise

    def totals(self, workers: Iterable[WorkerRecord]) -> dict[str, int]:
        """Tokens by worker id. Forgets what the records count, and workers that have none."""
        clocks = {worker.worker_id: worker.clock_ms for worker in workers}
        self._promises = {
            worker_id: left
            for worker_id, promises in self._promises.items()
            if worker_id in clocks
            and (left := [promise for promise in promises if not _is_counted(promise, clocks[worker_id])])
        }
        return {worker_id: sum(p.tokens for p in promises) for worker_id, promises in self._promises.items()}


def _is_counted(promise: Promise, record_ms: int) -> bool:
    return promise.is_over or (promise.accepted_ms is not None and record_ms >= promise.accepted_ms)
