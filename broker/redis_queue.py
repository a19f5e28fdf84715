"""The prefill queue in Redis: each method is one script call. The scripts are in `lua/`, the keys in `keys.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import structlog

from broker.base import DeadJob, JobFate, JobLease, PrefillJob, QueueDepth, Reaped, Taken
from broker.delivery import QueueSettings, cause_of, ms_to_due, tenant_cost_ms
from broker.errors import QueueUnavailable
from broker.keys import GROUP, Keys
from broker.redis_calls import Argument, RedisCalls
from broker.redis_replies import text
from broker.redis_wake import WakeReader
from pdq.wire.codec import Codec, DecodeError
from pdq.wire.types import Pair

_log = structlog.get_logger(__name__)

JOBS: Final[Codec[PrefillJob]] = Codec(PrefillJob)
_FATES_BATCH: Final = 500
_HELD_MAX: Final = 10_000
_DEPTH_SCAN: Final = 256
_DETAIL_MAX: Final = 500


class RedisPrefillQueue:
    """Of one model. `calls` is shared by the process and closed by its owner; `close` ends what this object started."""

    def __init__(self, calls: RedisCalls, model: str, settings: QueueSettings) -> None:
        """Raises ValueError for a model name that can't be part of a key."""
        self.keys = Keys(model)
        self._calls = calls
        self._settings = settings
        self._wake = WakeReader(calls, (self.keys.stream, self.keys.wake))
        self._reap_cursor = "0-0"
        self._returning: set[asyncio.Task[None]] = set()
        req_ttl_ms = _ms(settings.req_ttl_s)
        self._burial = (req_ttl_ms, _ms(settings.dead_payload_ttl_s), settings.max_dead_letters)
        self._gap_ms = _ms(calls.settings.redis_gap_s)
        if 0 < settings.lease_s * 2 / 3 < calls.settings.redis_gap_s:
            _log.warning("redis_gap_too_long", redis_gap_s=calls.settings.redis_gap_s, lease_s=settings.lease_s)

    async def enqueue(self, job: PrefillJob) -> str | None:
        keys = self.keys
        where = (*self._keys_of(job.request_id, job.gen), keys.tenants, keys.clock)
        tokens, settings = job.num_tokens, self._settings
        tenant = job.tenant if settings.tenant_ms_per_token > 0 and not job.waited_s else ""
        times = (
            ms_to_due(job.priority, tokens, settings, prefill_ms=job.prefill_ms, waited_s=job.waited_s),
            _ms(job.deadline_s),
            tenant,
            tenant_cost_ms(tokens, settings),
            _ms(settings.tenant_debt_s),
            GROUP,
            job.failures,
        )
        entry: tuple[Argument, ...] = ("id", job.request_id, "gen", job.gen, "tokens", tokens, "priority", job.priority)
        entry += ("mode", job.mode, "tenant", job.tenant, "gateway", job.gateway, "gateway_id", job.gateway_id)
        entry += ("traceparent", job.traceparent)
        is_queued, entry_id = await self._run("enqueue", where, (JOBS.encode(job), *times, *entry))
        return text(entry_id) if is_queued else None

    async def take(self, owner: str, *, max_tokens: int, max_jobs: int, is_idle: bool = True) -> Taken:
        leases: list[JobLease] = []
        dead: list[DeadJob] = []
        is_more_to_see, is_unsure, is_cut_short, num_left = max_jobs > 0, False, 0, 0
        while is_more_to_see and not leases:
            try:
                reply = await self._take_once(owner, max_tokens, max_jobs, is_idle)
            except QueueUnavailable:
                if not dead:
                    raise
                is_unsure = True
                break  # their gateways must hear of those that have ended
            is_cut_short, num_left, stream_id, wake_id, taken, ended = reply
            dead += [_dead(raw) for raw in ended]
            newest = {self.keys.stream: text(stream_id), self.keys.wake: text(wake_id)}
            is_more_to_see = bool(is_cut_short or (taken and num_left))  # also behind one that can't be read
            self._wake.saw(newest, is_more_waiting=is_more_to_see)
            for raw in taken:
                lease = _lease(owner, raw)
                if isinstance(lease, JobLease):
                    leases.append(lease)
                else:
                    dead += await self._bury_unreadable(lease)
        is_more_waiting = bool(is_cut_short or num_left)
        return Taken(leases=tuple(leases), dead=tuple(dead), is_more_waiting=is_more_waiting, is_unsure=is_unsure)

    async def wait(self, timeout_s: float) -> bool:
        return await self._wake.wait(timeout_s)

    async def renew(self, leases: tuple[JobLease, ...]) -> tuple[bool, ...]:
        if not leases:
            return ()
        keys = self.keys
        where = (keys.stream, keys.ready, keys.clock, keys.workers)
        args: list[Argument] = [GROUP, self._gap_ms, _ms(self._settings.orphan_s), self._burial[0]]
        for lease in leases:
            _, _, req, payload = self._keys_of(lease.job.request_id, lease.job.gen)
            args += [lease.owner, lease.entry_id, req, payload, lease.pair.attempt, lease.job.gateway_id]
        return tuple(bool(is_ours) for is_ours in await self._run("renew", where, args))

    async def settle(self, lease: JobLease, *, state: str, decode_worker: str = "") -> bool:
        args = (*_fence(lease), state, decode_worker, self._burial[0])
        return bool(await self._run("settle", self._keys_of(lease.job.request_id, lease.job.gen), args))

    async def give_back(self, lease: JobLease, *, failure: str | None) -> DeadJob | None:
        return await self._give_back(
            lease.job.request_id, lease.job.gen, _fence(lease), failure, self._settings.max_failures, "max_attempts"
        )

    async def reap(self) -> Reaped:
        keys, settings = self.keys, self._settings
        where = (keys.stream, keys.ready, keys.dead, keys.clock, keys.wake)
        dead: list[DeadJob] = []
        num_back = 0
        for _ in range(settings.reap_calls_max):
            args = (GROUP, keys.prefix, _ms(settings.lease_s), self._gap_ms, self._reap_cursor, settings.reap_batch)
            limits = (settings.max_failures, *self._burial, _ms(settings.consumer_idle_s))
            try:
                cursor, count, ended = await self._run("reap", where, (*args, *limits))
            except QueueUnavailable:
                if not dead:
                    raise
                break  # their gateways must hear of those that have ended
            dead += [_dead(raw) for raw in ended]
            num_back += int(count)
            self._reap_cursor = text(cursor)
            if self._reap_cursor == "0-0":
                break
        await self._adopt()
        if num_back or dead:
            _log.warning("leases_reaped", put_back=num_back, dead=[job.request_id for job in dead])
        return Reaped(num_put_back=num_back, dead=tuple(dead))

    async def _adopt(self) -> None:
        """What is nobody's becomes somebody's again; foreign entries end as dead letters at the next take."""
        keys, start, num_adopted = self.keys, "-", 0
        for _ in range(self._settings.reap_calls_max):
            args = (GROUP, keys.prefix, start, self._settings.reap_batch)
            try:
                after, count = await self._run("adopt", (keys.stream, keys.ready, keys.wake), args)
            except QueueUnavailable:
                break  # what was reaped must be told; the next reap looks again
            num_adopted += int(count)
            start = text(after)
            if not start:
                break
        if num_adopted:
            _log.warning("entries_adopted", entries=num_adopted)

    async def cancel(self, request_id: str, gen: int) -> str | None:
        owner = await self._run("cancel", self._keys_of(request_id, gen), (GROUP, self._burial[0]))
        return text(owner) or None

    async def give_back_others(self, owner: str, keep: tuple[JobLease, ...]) -> int:
        where = (self.keys.stream, self.keys.ready, self.keys.wake)
        args: tuple[Argument, ...] = (GROUP, owner, self.keys.prefix, _HELD_MAX, *(lease.entry_id for lease in keep))
        return int(await self._run("give_back_others", where, args))

    async def leave(self, owner: str) -> bool:
        return bool(await self._run("leave", (self.keys.stream,), (GROUP, owner)))

    async def fates(self, requests: tuple[tuple[str, int], ...]) -> tuple[JobFate, ...]:
        where = (self.keys.stream, self.keys.ready)
        fates: list[JobFate] = []
        for start in range(0, len(requests), _FATES_BATCH):
            batch = requests[start : start + _FATES_BATCH]
            reply = await self._run("fates", where, [self.keys.req(*request) for request in batch])
            fates += [JobFate(state=text(state), detail=text(detail)) for state, detail in reply]
        return tuple(fates)

    async def depth(self) -> QueueDepth:
        where = (self.keys.stream, self.keys.ready, self.keys.dead)
        found = await self._run("depth", where, (GROUP, _DEPTH_SCAN))
        queued, running, dead, wait_ms, queued_tokens, running_tokens = (int(number) for number in found)
        return QueueDepth(
            queued=queued,
            running=running,
            dead=dead,
            oldest_wait_s=wait_ms / 1000,
            queued_tokens=queued_tokens,
            running_tokens=running_tokens,
        )

    async def close(self) -> None:
        await self._wake.close()
        await asyncio.gather(*self._returning, return_exceptions=True)

    async def _take_once(self, owner: str, max_tokens: int, max_jobs: int, is_idle: bool) -> Any:
        keys, settings = self.keys, self._settings
        where = (keys.stream, keys.ready, keys.dead, keys.clock, keys.workers, keys.wake)
        args = (GROUP, owner, keys.prefix, max_tokens, max_jobs, settings.take_scan_max)
        limits = (self._gap_ms, _ms(settings.orphan_s), *self._burial, int(is_idle))
        reply = self._calls.submit_script("take", where, (*args, *limits), group=(keys.stream, GROUP))
        try:
            return await asyncio.shield(reply)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._return_late(owner, reply), name="return-late-take")
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)
            raise

    async def _return_late(self, owner: str, reply: asyncio.Future[Any]) -> None:
        """The taker was cancelled: what it would have got goes back at once, instead of after a lease."""
        try:
            for raw in (await reply)[4]:
                lease = _lease(owner, raw)
                if isinstance(lease, JobLease):
                    await self.give_back(lease, failure=None)
        except QueueUnavailable as exc:
            _log.warning("late_take_not_returned", error=str(exc))

    async def _bury_unreadable(self, lease: _Unreadable) -> list[DeadJob]:
        fence = (GROUP, lease.owner, lease.entry_id, lease.attempt)
        _log.error("payload_unreadable", request_id=lease.request_id, error=lease.error)
        dead = await self._give_back(lease.request_id, lease.gen, fence, lease.error, 1, "payload_invalid")
        return [dead] if dead is not None else []

    async def _give_back(
        self, request_id: str, gen: int, fence: Sequence[Argument], failure: str | None, max_failures: int, reason: str
    ) -> DeadJob | None:
        where = (*self._keys_of(request_id, gen), self.keys.dead, self.keys.wake)
        counted = "" if failure is None else (failure or "unknown failure")[:_DETAIL_MAX]
        args = (*fence, counted, max_failures, reason, *self._burial, "" if failure is None else cause_of(failure))
        raw = await self._run("give_back", where, args)
        return _dead(raw) if raw else None

    def _keys_of(self, request_id: str, gen: int) -> tuple[str, str, str, str]:
        keys = self.keys
        return keys.stream, keys.ready, keys.req(request_id, gen), keys.job(request_id, gen)

    async def _run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        return await self._calls.run(name, keys, args, group=(self.keys.stream, GROUP))


class _Unreadable:
    """A job that was taken but can't be understood (other version, damaged)."""

    def __init__(self, owner: str, entry_id: str, attempt: int, request_id: str, gen: int, error: str) -> None:
        self.owner, self.entry_id, self.attempt = owner, entry_id, attempt
        self.request_id, self.gen, self.error = request_id, gen, error


def _lease(owner: str, raw: Sequence[Any]) -> JobLease | _Unreadable:
    entry_id, request_id, gen, attempt, failures, left_ms, waited_ms, payload = raw
    try:
        job, _ = JOBS.decode(payload)
        if (job.request_id, job.gen) != (text(request_id), int(gen)):
            raise DecodeError("of another request")
    except DecodeError as exc:
        return _Unreadable(owner, text(entry_id), int(attempt), text(request_id), int(gen), f"payload: {exc}")
    return JobLease(
        job=job,
        entry_id=text(entry_id),
        owner=owner,
        pair=Pair(gen=job.gen, attempt=int(attempt)),
        remaining_s=int(left_ms) / 1000,
        queue_wait_s=int(waited_ms) / 1000,
        failures=int(failures),
    )


def _dead(raw: Sequence[Any]) -> DeadJob:
    request_id, gen, attempt, gateway, gateway_id, reason, detail = (text(value) for value in raw)
    return DeadJob(
        request_id=request_id,
        pair=Pair(gen=int(gen), attempt=int(attempt)),
        gateway=gateway,
        gateway_id=gateway_id,
        reason=reason,
        detail=detail,
    )


def _fence(lease: JobLease) -> tuple[Argument, ...]:
    return (GROUP, lease.owner, lease.entry_id, lease.pair.attempt)


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
