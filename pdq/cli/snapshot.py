"""One moment of each served model, read from Redis for people."""

from __future__ import annotations

from dataclasses import dataclass

from broker.base import QueueDepth, WorkerRecord
from broker.delivery import QueueSettings
from broker.redis_queue import RedisPrefillQueue
from broker.redis_registry import RedisRegistry
from broker.redis_scale import RedisScale, ScaleRow
from broker.redis_view import RequestView, queued_requests
from broker.registry_settings import RegistrySettings
from pdq.cli.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    model: str
    workers: tuple[WorkerRecord, ...]
    depth: QueueDepth
    requests: tuple[RequestView, ...]
    """The oldest of those that are queued or in prefill."""
    scale: tuple[ScaleRow, ...]


async def snapshots(store: Store, max_requests: int) -> list[Snapshot]:
    """Of each model. Raises QueueUnavailable."""
    found: list[Snapshot] = []
    for model in await store.models():
        queue = RedisPrefillQueue(store.calls, model, QueueSettings())
        try:
            found.append(
                Snapshot(
                    model=model,
                    workers=await RedisRegistry(store.calls, model, RegistrySettings()).workers(),
                    depth=await queue.depth(),
                    requests=await queued_requests(store.calls, model, max_requests),
                    scale=await RedisScale(store.calls, model, RegistrySettings()).rows(),
                )
            )
        finally:
            await queue.close()
    return found
