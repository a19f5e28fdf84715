"""The four stores that the queue's contract is tested on, behind one small face."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fakeredis import FakeServer
from fakeredis.aioredis import FakeAsyncRedisConnection

from broker.base import JobLease, PrefillJob, PrefillQueue, Registry
from broker.delivery import QueueSettings
from broker.memory import MemoryQueue
from broker.memory_registry import MemoryRegistry
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_queue import RedisPrefillQueue
from broker.redis_registry import RedisRegistry
from broker.redis_replies import text
from broker.registry_settings import RegistrySettings
from pdq.wire.types import SamplingParams, pack_ids

LIMIT_S = 40.0
PATIENCE: dict[str, Any] = {"redis_timeout_s": 60.0, "redis_connect_timeout_s": 30.0}
"""Settings of whoever must not take a busy machine for a Redis that is away."""
GAP_S = 20.0
"""For the same reason: a shorter silence of Redis is no gap in these tests."""
TTL_S = 60.0
"""Of processes that beat once and are meant to live."""
MODEL = "acme/model"
_numbers = itertools.count(1)


def job(request_id: str = "", *, tokens: int = 4, gen: int = 1, **changes: Any) -> PrefillJob:
    values: dict[str, Any] = {
        "request_id": request_id or f"r{next(_numbers)}",
        "gen": gen,
        "prompt_ids": pack_ids(range(tokens)),
        "generated_ids": b"",
        "sampling": SamplingParams(max_tokens=3, temperature=0.0),
        "deadline_s": 600.0,
        "gateway": "tcp://127.0.0.1:1",
        "gateway_id": "gateway-a",
        "mode": "pull",
    }
    return PrefillJob(**(values | changes))


async def take_one(queue: PrefillQueue, owner: str = "p1") -> JobLease:
    taken = await queue.take(owner, max_tokens=10**9, max_jobs=1)
    assert len(taken.leases) == 1
    return taken.leases[0]


async def eventually(is_true: Callable[[], Awaitable[bool]]) -> None:
    """Asks again and again, for a limited time."""
    async with asyncio.timeout(LIMIT_S):
        while not await is_true():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.01)


class Store(Protocol):
    name: str
    queue: PrefillQueue
    registry: Registry

    def other(self, **changes: Any) -> PrefillQueue:
        """Another process's queue object on the same data, with other settings."""

    async def expire_leases(self) -> tuple[Any, ...]:
        """What reap returns once all leases have run out."""

    async def leftovers(self) -> tuple[int, int, int]:
        """XLEN, XPENDING, ZCARD."""

    async def state(self, request_id: str, gen: int = 1) -> str | None: ...

    async def close(self) -> None: ...


class FakeConnector:
    """Connections to a fakeredis server inside the test process."""

    where = "fakeredis"

    def __init__(self) -> None:
        self.server = FakeServer(version=(7, 0))
        self.num_opened = 0

    async def open(self) -> Any:
        self.num_opened += 1
        connection = FakeAsyncRedisConnection(server=self.server, protocol=2, socket_timeout=None)
        await connection.connect()
        return connection


class RedisStore:
    def __init__(self, name: str, calls: RedisCalls, settings: QueueSettings | None = None) -> None:
        self.name = name
        self.calls = calls
        self.settings = settings or QueueSettings()
        self.queue = RedisPrefillQueue(calls, MODEL, self.settings)
        self.registry = RedisRegistry(calls, MODEL, RegistrySettings(registry_ttl_s=TTL_S))
        self._others: list[RedisPrefillQueue] = []

    def other(self, **changes: Any) -> RedisPrefillQueue:
        queue = RedisPrefillQueue(self.calls, MODEL, dataclasses.replace(self.settings, **changes))
        self._others.append(queue)
        return queue

    async def expire_leases(self) -> tuple[Any, ...]:
        return (await self.other(lease_s=0.0).reap()).dead

    async def set_clock(self, *, last_ago_s: float, since_ago_s: float) -> None:
        """As if Redis had been seen last, and without a gap, so long ago."""
        seconds, microseconds = map(int, await self.calls.call("TIME"))
        now_ms = seconds * 1000 + microseconds // 1000
        last, since = (round(now_ms - ago_s * 1000) for ago_s in (last_ago_s, since_ago_s))
        await self.calls.call("HSET", self.queue.keys.clock, "last", last, "since", since)

    async def leftovers(self) -> tuple[int, int, int]:
        keys = self.queue.keys
        await self.queue.depth()  # makes the group if nobody has yet
        length, pending, ready = await asyncio.gather(
            self.calls.call("XLEN", keys.stream),
            self.calls.call("XPENDING", keys.stream, "prefill", "-", "+", 10**6),
            self.calls.call("ZCARD", keys.ready),
        )
        return length, len(pending), ready

    async def state(self, request_id: str, gen: int = 1) -> str | None:
        return text(await self.calls.call("HGET", self.queue.keys.req(request_id, gen), "state")) or None

    async def close(self) -> None:
        for queue in (self.queue, *self._others):
            await queue.close()
        await self.calls.close()


class MemoryStore:
    name = "memory"

    def __init__(self, settings: QueueSettings | None = None) -> None:
        self.now_s = 1000.0
        self.settings = settings or QueueSettings()
        self.queue = MemoryQueue(self.settings, clock=lambda: self.now_s)
        self.registry = MemoryRegistry(clock=lambda: self.now_s)

    def other(self, **changes: Any) -> MemoryQueue:
        assert not changes
        return self.queue

    async def expire_leases(self) -> tuple[Any, ...]:
        self.now_s += self.settings.lease_s
        return (await self.queue.reap()).dead

    async def leftovers(self) -> tuple[int, int, int]:
        depth = await self.queue.depth()
        return depth.queued + depth.running, depth.running, depth.queued

    async def state(self, request_id: str, gen: int = 1) -> str | None:
        return self.queue.state_of(request_id, gen)

    async def close(self) -> None:
        await self.queue.close()


def fake_calls() -> RedisCalls:
    return RedisCalls(RedisSettings(redis_block_s=0.2, redis_gap_s=GAP_S, **PATIENCE), connector=FakeConnector())


async def real_calls(url: str, **changes: Any) -> RedisCalls:
    """On an emptied server, with patience for a busy machine."""
    calls = RedisCalls(RedisSettings(redis=url, **{"redis_gap_s": GAP_S, **PATIENCE, **changes}))
    await calls.call("FLUSHALL")
    await calls.call("SCRIPT", "FLUSH")
    return calls
