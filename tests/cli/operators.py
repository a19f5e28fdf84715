"""For the tests of the operators' commands: a command beside the test's loop, and what it finds in Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from broker.base import PrefillJob, WorkerRecord
from broker.delivery import QueueSettings
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_queue import RedisPrefillQueue
from broker.redis_registry import RedisRegistry
from broker.redis_scale import RedisScale, UpState, Wish
from broker.registry_settings import RegistrySettings
from pdq.cli.main import main
from pdq.wire.types import SamplingParams, pack_ids
from tests.broker.stores import PATIENCE, TTL_S
from tests.servers import RedisServer

MODEL = "tiny"
ROW = "box:/srv/.pdq"
SECRET = 7777
"""A token id of every prompt, that no command may print."""


@dataclass(slots=True)
class Field:
    """What a command meets: the test's own view of the same Redis, and processes that beat."""

    calls: RedisCalls
    url: str
    records: list[WorkerRecord] = field(default_factory=list)
    state: UpState | None = None
    wish: Wish = field(default_factory=lambda: Wish(prefill=1, decode=1))
    drained: list[str] = field(default_factory=list)

    @property
    def registry(self) -> RedisRegistry:
        return RedisRegistry(self.calls, MODEL, RegistrySettings(registry_ttl_s=TTL_S))

    @property
    def scale(self) -> RedisScale:
        return RedisScale(self.calls, MODEL, RegistrySettings(registry_ttl_s=TTL_S))

    async def run(self, *argv: str) -> int:
        """The command, in a thread, so that this loop goes on."""
        return await asyncio.to_thread(main, [*argv, "--redis", self.url])

    async def beat_all(self) -> None:
        """Once; who was asked to drain is noted and leaves, as a worker without work does."""
        for record in list(self.records):
            if await lasting_heartbeat(self.calls, self.registry, record):
                self.drained.append(record.worker_id)
                self.records.remove(record)
                await self.registry.remove(record.worker_id)
        if self.state is not None:
            self.wish = await self.scale.beat(ROW, self.state, self.wish)

    async def bury(self, name: str, *, failure: str = "boom") -> None:
        queue = RedisPrefillQueue(self.calls, MODEL, QueueSettings(max_failures=1))
        try:
            await queue.enqueue(job(name))
            taken = await queue.take("p9", max_tokens=10**6, max_jobs=1)
            await queue.give_back(taken.leases[0], failure=failure)
        finally:
            await queue.close()

    async def enqueue(self, name: str) -> None:
        queue = RedisPrefillQueue(self.calls, MODEL, QueueSettings())
        try:
            await queue.enqueue(job(name))
        finally:
            await queue.close()


@contextlib.asynccontextmanager
async def field_of(server: RedisServer, *, beats: bool = True, **values: Any) -> AsyncIterator[Field]:
    """Beats every 50 ms until left."""
    made = Field(calls=RedisCalls(RedisSettings(redis=server.url, **PATIENCE)), url=server.url, **values)

    async def beat() -> None:
        while True:
            await made.beat_all()
            await asyncio.sleep(0.05)

    task: asyncio.Task[None] | None = None
    try:
        await made.beat_all()
        await made.calls.call("SADD", "pdq:models", MODEL)
        task = asyncio.create_task(beat()) if beats else None
        yield made
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await made.calls.close()


async def lasting_heartbeat(calls: RedisCalls, registry: RedisRegistry, record: WorkerRecord) -> bool:
    """The process counts as alive for TTL_S after it, however late its next one is. True: it is asked to drain."""
    shall_drain = await registry.heartbeat(record)
    seconds, _ = await calls.call("TIME")
    await calls.call("ZADD", registry.keys.workers, round((int(seconds) + TTL_S) * 1000), record.worker_id)
    return shall_drain


def worker(worker_id: str, **values: Any) -> WorkerRecord:
    known = {"role": worker_id.partition("-")[0], "state": "ready", "endpoint": "tcp://h:1", "fingerprint": "f"}
    return WorkerRecord(worker_id=worker_id, model=MODEL, **{**known, **values})


def job(name: str) -> PrefillJob:
    return PrefillJob(
        request_id=name,
        gen=1,
        prompt_ids=pack_ids([SECRET] * 123),
        generated_ids=pack_ids([1, 2]),
        sampling=SamplingParams(max_tokens=30),
        deadline_s=60.0,
        gateway="tcp://h:2",
        gateway_id="gateway-h-2-def",
        mode="push",
    )
