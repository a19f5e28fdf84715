"""The queue's twin in memory, for tests and for one-process set-ups: same port, same rules, no Redis.

One object is the store and its only client. Time is an argument of the constructor, so a test can move it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from broker.base import DeadJob, JobFate, JobLease, PrefillJob, QueueDepth, Reaped, Taken
from broker.delivery import (
    QueueSettings,
    Verdict,
    after_failure,
    is_expired,
    ms_to_due,
    tenant_cost_ms,
    tenant_start_ms,
)
from broker.memory_registry import MemoryRegistry
from pdq.wire.types import Pair

__all__ = ["MemoryQueue", "MemoryRegistry"]

Key = tuple[str, int]


@dataclass(slots=True)
class _Request:
    """What `req:<id>:<gen>` says; it outlives the job."""

    state: str
    ended_ms: float | None = None
    attempt: int = 0
    failures: int = 0
    worker: str = ""
    decode: str = ""
    reason: str = ""
    entry_id: str = ""


@dataclass(slots=True)
class _Entry:
    job: PrefillJob
    entry_id: str
    number: int
    enqueued_ms: float
    due_ms: float
    deadline_ms: float
    owner: str | None = None
    touched_ms: float = field(default=0.0)
    """Taken or renewed."""

    @property
    def key(self) -> Key:
        return self.job.request_id, self.job.gen


class MemoryQueue:
    def __init__(self, settings: QueueSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._settings = settings
        self._clock = clock
        self._requests: dict[Key, _Request] = {}
        self._entries: dict[str, _Entry] = {}
        self._virtual_ms: dict[str, float] = {}
        self._numbers = 0
        self._arrivals = 0
        self._seen_arrivals = 0
        self._arrived = asyncio.Event()
        self.dead_letters: list[DeadJob] = []

    async def enqueue(self, job: PrefillJob) -> str | None:
        self._forget_ended()
        key = (job.request_id, job.gen)
        known = self._requests.get(key)
        if known is not None:
            return None if known.state == "cancelled" else known.entry_id
        now, tokens = self._now_ms(), job.num_tokens
        start = now
        if job.tenant and self._settings.tenant_ms_per_token > 0 and not job.waited_s:
            start = tenant_start_ms(now, self._virtual_ms.get(job.tenant), self._settings)
            self._virtual_ms[job.tenant] = start + tenant_cost_ms(tokens, self._settings)
        self._numbers += 1
        entry = _Entry(
            job=job,
            entry_id=f"{round(now)}-{self._numbers}",
            number=self._numbers,
            enqueued_ms=now,
            due_ms=start
            + ms_to_due(job.priority, tokens, self._settings, prefill_ms=job.prefill_ms, waited_s=job.waited_s),
            deadline_ms=now + job.deadline_s * 1000,
        )
        self._entries[entry.entry_id] = entry
        self._requests[key] = _Request(state="queued", entry_id=entry.entry_id, failures=job.failures)
        self._announce()
        return entry.entry_id

    async def take(self, owner: str, *, max_tokens: int, max_jobs: int, is_idle: bool = True) -> Taken:
        now = self._now_ms()
        leases: list[JobLease] = []
        dead: list[DeadJob] = []
        num_left = 0
        for entry in self._ready():
            if len(leases) == max_jobs:
                num_left += 1
            elif entry.deadline_ms <= now:
                dead.append(self._end(entry, "deadline", "deadline passed while queued"))
            elif entry.job.num_tokens > max_tokens or (self._has_failed(entry) and (leases or not is_idle)):
                num_left += 1
                break
            else:
                max_tokens -= entry.job.num_tokens
                leases.append(self._lease(entry, owner, now))
                if self._has_failed(entry):
                    max_jobs = 1
        if max_jobs and not (leases and num_left):
            self._seen_arrivals = self._arrivals
        return Taken(leases=tuple(leases), dead=tuple(dead), is_more_waiting=num_left > 0)

    async def wait(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while self._seen_arrivals == self._arrivals:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            return False
        self._seen_arrivals = self._arrivals
        return True

    async def renew(self, leases: tuple[JobLease, ...]) -> tuple[bool, ...]:
        answers: list[bool] = []
        for lease in leases:
            entry = self._owned(lease)
            if entry is not None:
                entry.touched_ms = self._now_ms()
            answers.append(entry is not None)
        return tuple(answers)

    async def settle(self, lease: JobLease, *, state: str, decode_worker: str = "") -> bool:
        entry = self._owned(lease)
        if entry is None:
            return False
        self._remove(entry, state, "")
        self._requests[entry.key].decode = decode_worker
        return True

    async def give_back(self, lease: JobLease, *, failure: str | None) -> DeadJob | None:
        entry = self._owned(lease)
        return None if entry is None else self._put_back(entry, failure)

    async def reap(self) -> Reaped:
        now = self._now_ms()
        held = [entry for entry in self._entries.values() if entry.owner is not None]
        expired = [entry for entry in held if is_expired(entry.touched_ms, now, self._settings)]
        ended = [self._put_back(entry, f"lease of {entry.owner} ran out") for entry in expired]
        dead = tuple(dead for dead in ended if dead is not None)
        return Reaped(num_put_back=len(ended) - len(dead), dead=dead)

    async def cancel(self, request_id: str, gen: int) -> str | None:
        self._forget_ended()
        request = self._requests.setdefault((request_id, gen), _Request(state=""))
        if request.state not in ("", "queued", "prefill"):
            return None
        owner = request.worker if request.state == "prefill" else None
        entry = self._entries.get(request.entry_id)
        if entry is not None:
            self._remove(entry, "cancelled", "")
        request.state, request.ended_ms = "cancelled", self._now_ms()
        return owner

    async def give_back_others(self, owner: str, keep: tuple[JobLease, ...]) -> int:
        kept = {lease.entry_id for lease in keep}
        others = [entry for entry in self._entries.values() if entry.owner == owner and entry.entry_id not in kept]
        for entry in others:
            self._put_back(entry, None)
            self._requests[entry.key].reason = "reply lost"
        return len(others)

    async def leave(self, owner: str) -> bool:
        return not any(entry.owner == owner for entry in self._entries.values())

    async def fates(self, requests: tuple[Key, ...]) -> tuple[JobFate, ...]:
        self._forget_ended()
        found = (self._requests.get(key) for key in requests)
        return tuple(
            JobFate(state="lost") if known is None else JobFate(state=known.state, detail=known.reason)
            for known in found
        )

    async def depth(self) -> QueueDepth:
        ready = self._ready()
        oldest = min((entry.enqueued_ms for entry in ready), default=self._now_ms())
        return QueueDepth(
            queued=len(ready),
            running=len(self._entries) - len(ready),
            dead=len(self.dead_letters),
            oldest_wait_s=(self._now_ms() - oldest) / 1000,
            queued_tokens=sum(entry.job.num_tokens for entry in ready),
            running_tokens=sum(e.job.num_tokens for e in self._entries.values() if e.owner is not None),
        )

    async def close(self) -> None:
        """Nothing to close."""

    def state_of(self, request_id: str, gen: int) -> str | None:
        """For tests: what HGET of the request hash would say."""
        request = self._requests.get((request_id, gen))
        return None if request is None else request.state

    def failures_of(self, request_id: str, gen: int) -> int:
        """For tests, as `state_of`."""
        return self._requests[request_id, gen].failures

    def _now_ms(self) -> float:
        return self._clock() * 1000

    def _has_failed(self, entry: _Entry) -> bool:
        return self._requests[entry.key].failures > 0

    def _ready(self) -> list[_Entry]:
        waiting = (entry for entry in self._entries.values() if entry.owner is None)
        return sorted(waiting, key=lambda entry: (entry.due_ms, entry.number))

    def _owned(self, lease: JobLease) -> _Entry | None:
        entry = self._entries.get(lease.entry_id)
        if entry is None or entry.owner != lease.owner or self._requests[entry.key].attempt != lease.pair.attempt:
            return None
        return entry

    def _lease(self, entry: _Entry, owner: str, now: float) -> JobLease:
        request = self._requests[entry.key]
        request.attempt += 1
        request.state, request.worker = "prefill", owner
        entry.owner, entry.touched_ms = owner, now
        return JobLease(
            job=entry.job,
            entry_id=entry.entry_id,
            owner=owner,
            pair=Pair(gen=entry.job.gen, attempt=request.attempt),
            remaining_s=(entry.deadline_ms - now) / 1000,
            queue_wait_s=(now - entry.enqueued_ms) / 1000,
            failures=request.failures,
        )

    def _put_back(self, entry: _Entry, failure: str | None) -> DeadJob | None:
        request = self._requests[entry.key]
        request.failures += failure is not None
        if failure is not None and after_failure(request.failures, self._settings) is Verdict.DEAD_LETTER:
            dead = self._end(entry, "max_attempts", failure)
            self.dead_letters = [*self.dead_letters, dead][-self._settings.max_dead_letters :]
            return dead
        request.state, request.worker, request.reason = "queued", "", failure or ""
        entry.owner = None
        self._announce()
        return None

    def _end(self, entry: _Entry, reason: str, detail: str) -> DeadJob:
        job, attempt = entry.job, self._requests[entry.key].attempt
        self._remove(entry, reason, detail)
        return DeadJob(
            request_id=job.request_id,
            pair=Pair(gen=job.gen, attempt=attempt),
            gateway=job.gateway,
            gateway_id=job.gateway_id,
            reason=reason,
            detail=detail,
        )

    def _remove(self, entry: _Entry, state: str, reason: str) -> None:
        del self._entries[entry.entry_id]
        request = self._requests[entry.key]
        request.state, request.reason, request.ended_ms = state, reason, self._now_ms()

    def _forget_ended(self) -> None:
        horizon = self._now_ms() - self._settings.req_ttl_s * 1000
        ended = [key for key, req in self._requests.items() if req.ended_ms is not None and req.ended_ms < horizon]
        for key in ended:
            del self._requests[key]

    def _announce(self) -> None:
        self._arrivals += 1
        self._arrived.set()
