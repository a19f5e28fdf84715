"""Start-up and shutdown of a prefill worker, in the order in which they happen."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.delivery import QueueSettings
from broker.errors import CANNOT_START
from broker.links import NoticeInbox, NoticePeers, NoticeSettings
from broker.membership import Membership, RegistryView
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_queue import RedisPrefillQueue
from broker.redis_registry import RedisRegistry
from broker.registry_settings import RegistrySettings
from engine.factory import EngineProcessSettings, create_engine, engine_collectors, engine_ports, start_engine
from pdq.runtime.common import RuntimeSettings
from pdq.runtime.metrics import MetricsListener, metrics_ports, new_registry
from pdq.runtime.model import ModelSettings
from pdq.runtime.ports import FixedPort, check_ports
from pdq.runtime.process import log_ready, run_role
from pdq.runtime.settings import load
from pdq.runtime.signals import Drain
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.settings import PrefillWorkerSettings
from prefill_worker.worker import PrefillWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of this process."""

    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    worker: PrefillWorkerSettings = field(default_factory=PrefillWorkerSettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    registry: RegistrySettings = field(default_factory=RegistrySettings)
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    engine: EngineProcessSettings = field(default_factory=EngineProcessSettings)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 drained, 1 fault, 2 bad settings or machine."""
    loaded = load(Settings, argv, prog="python -m prefill_worker", description="Takes prompts, computes their KV.")
    return run_role(
        "prefill",
        loaded.settings.runtime,
        functools.partial(serve, loaded.settings),
        cannot_start=CANNOT_START,
    )


async def serve(settings: Settings, drain: Drain, worker_id: str) -> None:
    """Ports, settings, Redis, inbox, engine, registry; back in the reverse order."""
    notices = settings.notices
    inbox_port = FixedPort(host=notices.inbox_host, port=notices.inbox_port, setting="--inbox-port")
    check_ports([inbox_port, *metrics_ports(settings.runtime), *engine_ports(settings.engine)])
    engine = create_engine(settings.engine, settings.model, settings.runtime, role="producer", worker_id=worker_id)
    metrics = new_registry()
    for collector in engine_collectors(settings.engine):
        metrics.register(collector)
    listener = MetricsListener(metrics, host=settings.runtime.metrics_host, port=settings.runtime.metrics_port)
    calls = RedisCalls(settings.redis, client_name=worker_id)
    try:
        await drain.unless_requested(calls.start_when_reachable())
        queue = RedisPrefillQueue(calls, settings.model.name, settings.queue)
        registry = RedisRegistry(calls, settings.model.name, settings.registry)
        inbox = NoticeInbox(notices, worker_id=worker_id)
        peers = NoticePeers(notices, worker_id=worker_id)
        try:
            info = await drain.unless_requested(start_engine(engine))
            view = RegistryView()
            worker = PrefillWorker(
                worker_id=worker_id,
                endpoint=inbox.endpoint,
                model=settings.model.name,
                settings=settings.worker,
                drain_grace_s=settings.runtime.drain_grace_s,
                stall_exit_s=settings.engine.engine_stall_exit_s,
                lease_s=settings.queue.lease_s,
                queue=queue,
                engine=engine,
                engine_info=info,
                peers=peers,
                view=view,
                metrics=PrefillMetrics(metrics),
                clock=asyncio.get_running_loop().time,
                rng=random.Random(),
            )
            membership = Membership(
                registry,
                view,
                heartbeat_s=settings.runtime.heartbeat_s,
                config={"mode": settings.model.mode},
                record=worker.record,
                on_drain=functools.partial(drain.request, "asked through the registry"),
            )
            await drain.unless_requested(membership.join())
            await inbox.start(worker.on_notice)
            log_ready(inbox=inbox.endpoint, redis=calls.connector.where, blocks=info.total_blocks)
            await worker.run(drain, membership)
        finally:
            await engine.stop()
            await peers.close()
            await inbox.close()
            await queue.close()
    finally:
        await calls.close()
        listener.close()
