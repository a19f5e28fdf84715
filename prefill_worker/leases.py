"""Keeps the leases of held jobs alive, and puts other workers' expired ones back.

Renewal is tied to progress: while a job computes, the engine must have moved since `prefill_stall_s`; a heartbeat alone
would keep the job of a hung engine for ever. After Redis was away, what is held is renewed first and nothing is reaped
for one lease: everybody's leases look expired then.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Final

import structlog

from broker.base import DeadJob, PrefillQueue
from broker.errors import QueueUnavailable
from engine.progress import Progress
from prefill_worker.held import HeldJob, HeldJobs, Phase
from prefill_worker.metrics import PrefillMetrics

_LATE_S: Final = 1.0
"""A round that comes so much later than due: this process hung itself, and the engine's beats are still to be read."""
log = structlog.get_logger(__name__)


class LeaseKeeper:
    def __init__(
        self,
        *,
        queue: PrefillQueue,
        held_jobs: HeldJobs,
        progress: Progress,
        lease_s: float,
        metrics: PrefillMetrics,
        on_dead: Callable[[DeadJob], None],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._queue = queue
        self._held_jobs = held_jobs
        self._progress = progress
        self._lease_s = lease_s
        self._metrics = metrics
        self._on_dead = on_dead
        self._clock = clock
        self._rng = rng
        self._reap_not_before = clock() + lease_s
        self._hurry = asyncio.Event()

    def renew_soon(self) -> None:
        """The engine hangs: its jobs should not wait for the next round."""
        self._hurry.set()

    async def run_renewals(self) -> None:
        """Every third of a lease, until cancelled."""
        while True:
            due_at = self._clock() + self._lease_s / 3
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await self._hurry.wait()
            self._hurry.clear()
            if self._clock() > due_at + _LATE_S:
                self._progress.excuse(self._clock())
            try:
                await self.renew_all()
            except QueueUnavailable as exc:
                log.warning("renewal_failed", error=str(exc), jobs=len(self._held_jobs))
                self._reap_not_before = self._clock() + self._lease_s

    async def renew_all(self) -> None:
        """One round. A lost lease cancels its job; a stalled engine's jobs are given back as failures."""
        is_stalled = self._progress.is_stalled(self._clock())
        renewable: list[HeldJob] = []
        for held in self._held_jobs.all():
            if is_stalled and held.phase is Phase.COMPUTING and held.end is None:
                await self._give_back_stalled(held)
            else:
                renewable.append(held)
        if not renewable:
            return
        kept = await self._queue.renew(tuple(held.lease for held in renewable))
        for held, is_ours in zip(renewable, kept, strict=True):
            if not is_ours:
                self._metrics.on_fenced("renew")
                log.info("lease_lost", request_id=held.lease.job.request_id, pair=str(held.lease.pair))
                self._cancel(held)

    async def run_reaping(self) -> None:
        """A sixth of a lease after the last time at most, with jitter, until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 6 * self._rng.uniform(0.5, 1.0))
            if self._clock() < self._reap_not_before:
                continue
            try:
                reaped = await self._queue.reap()
                self._metrics.on_reaped(reaped.num_put_back)
                for dead in reaped.dead:
                    self._on_dead(dead)
            except QueueUnavailable as exc:
                log.warning("reaping_failed", error=str(exc))
                self._reap_not_before = self._clock() + self._lease_s

    async def _give_back_stalled(self, held: HeldJob) -> None:
        log.warning("stalled_job_given_back", request_id=held.lease.job.request_id)
        failure = f"engine_stalled: no step for {self._progress.stall_s} s"
        self._metrics.on_failure(failure)
        dead = await self._queue.give_back(held.lease, failure=failure)
        self._cancel(held)
        if dead is not None:
            self._on_dead(dead)

    @staticmethod
    def _cancel(held: HeldJob) -> None:
        if held.task is not None:
            held.task.cancel()
