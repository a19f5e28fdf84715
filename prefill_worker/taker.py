"""Hop 3: when this worker takes jobs, and how many. Late binding: never more than the engine computes next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from broker.base import DeadJob, JobLease, PrefillQueue, Taken
from broker.errors import QueueUnavailable
from broker.prefill_time import PrefillTime
from engine.ledger import KvLedger
from prefill_worker.held import HeldJobs
from prefill_worker.settings import PrefillWorkerSettings

log = structlog.get_logger(__name__)

_ANY_SIZE: Final = 2**31 - 1
_MAX_JOBS: Final = 16
_WAIT_S: Final = 5.0
_RETRY_S: Final = 0.5


def take_limits(
    held_jobs: HeldJobs, ledger: KvLedger, settings: PrefillWorkerSettings, time: PrefillTime | None = None
) -> tuple[int, int]:
    """(tokens, jobs) that may be taken now; (0, 0) for nothing.

    An empty worker takes one job of any size, so that a prompt larger than its pool is refused aloud instead of
    standing at the queue's head for ever. An idle engine takes one job up to the pool's room; a busy one fills up
    to `take_tokens`, by so many jobs that a partly filled last block of each still fits. A slow one (`time`) doesn't,
    and one that doesn't know itself yet: what it begins after `take_ahead_s` is better left to whoever is free first.
    While a job is computed that failed before, nothing joins it: should it fail again, it fails alone.
    """
    if held_jobs.num_parked >= settings.park_limit or held_jobs.is_suspect_computing:
        return (0, 0)
    if ledger.is_empty:
        return (_ANY_SIZE, 1)
    computing = held_jobs.computing_tokens
    if computing == 0:
        return (ledger.free_tokens, 1) if ledger.free_tokens else (0, 0)
    num_jobs = max(1, min(_MAX_JOBS, ledger.free_blocks // 2))
    if time is None:
        return (0, 0)
    most = int(min(settings.take_tokens, time.tokens_within(settings.take_ahead_s * 1000)))
    tokens = min(ledger.tokens_for(num_jobs), most - computing)
    return (tokens, num_jobs) if tokens > 0 else (0, 0)


class Taker:
    def __init__(
        self,
        *,
        worker_id: str,
        queue: PrefillQueue,
        held_jobs: HeldJobs,
        ledger: KvLedger,
        settings: PrefillWorkerSettings,
        is_stalled: Callable[[], bool],
        prefill_time: Callable[[], PrefillTime | None],
        on_lease: Callable[[JobLease], None],
        on_dead: Callable[[DeadJob], None],
    ) -> None:
        """`is_stalled`: the engine makes no step and a job would only fail here; `room_changed` tells that it moves.

        `prefill_time`: as measured so far.
        """
        self._worker_id = worker_id
        self._queue = queue
        self._held_jobs = held_jobs
        self._ledger = ledger
        self._settings = settings
        self._is_stalled = is_stalled
        self._prefill_time = prefill_time
        self._on_lease = on_lease
        self._on_dead = on_dead
        self._room = asyncio.Event()
        self._stopping = asyncio.Event()
        self._has_unknown_take = False

    def stop(self) -> None:
        """No take after the one in flight: cancelling a take would leave its jobs to the reaper."""
        self._stopping.set()
        self._room.set()

    def room_changed(self) -> None:
        """A job ended, or blocks came back: more may fit now."""
        self._room.set()

    async def run(self) -> None:
        """Takes until `stop`: while jobs fit; then sleeps until room comes (jobs wait) or a job comes (none do)."""
        while not self._stopping.is_set():
            self._room.clear()
            max_tokens, max_jobs = take_limits(self._held_jobs, self._ledger, self._settings, self._prefill_time())
            if max_jobs == 0:
                await self._room.wait()
                continue
            if self._is_stalled():
                with contextlib.suppress(TimeoutError):  # a stall may also be excused, and nobody rings then
                    await asyncio.wait_for(self._room.wait(), _RETRY_S)
                continue
            try:
                taken = await self._take(max_tokens, max_jobs)
                if taken.dead:
                    continue  # some ended on the way: another take sees what is behind them
                if taken.is_more_waiting and not taken.leases:
                    await self._room.wait()
                elif not taken.is_more_waiting:
                    await self._until_stopped_or(self._queue.wait(_WAIT_S))
            except QueueUnavailable as exc:
                log.warning("take_failed", error=str(exc))
                self._has_unknown_take = True
                await self._until_stopped_or(asyncio.sleep(_RETRY_S))

    async def _take(self, max_tokens: int, max_jobs: int) -> Taken:
        if self._has_unknown_take:
            await self._return_unknown()
        is_idle = self._ledger.is_empty  # also of KV that is still to be read or written
        taken = await self._queue.take(self._worker_id, max_tokens=max_tokens, max_jobs=max_jobs, is_idle=is_idle)
        self._has_unknown_take = taken.is_unsure
        for lease in taken.leases:
            self._on_lease(lease)
        for dead in taken.dead:
            self._on_dead(dead)
        return taken

    async def _until_stopped_or(self, work: Coroutine[Any, Any, object]) -> None:
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)

    async def _return_unknown(self) -> None:
        """A take whose answer was lost may have run: what it took goes back now, instead of failing after a lease."""
        keep = tuple(held.lease for held in self._held_jobs.all())
        num_returned = await self._queue.give_back_others(self._worker_id, keep)
        self._has_unknown_take = False
        if num_returned:
            log.warning("lost_take_returned", jobs=num_returned)
