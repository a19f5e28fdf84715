"""Start-up and shutdown of a decode worker, in the order in which they happen."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.errors import CANNOT_START
from broker.links import DeltaSender, DeltaSettings, NoticeInbox, NoticePeers, NoticeSettings
from broker.membership import Membership, RegistryView
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_registry import RedisRegistry
from broker.registry_settings import RegistrySettings
from decode_worker.metrics import DecodeMetrics
from decode_worker.settings import DecodeWorkerSettings
from decode_worker.worker import DecodeWorker
from engine.factory import EngineProcessSettings, create_engine, engine_collectors, engine_ports, start_engine
from pdq.runtime.common import RuntimeSettings
from pdq.runtime.metrics import MetricsListener, metrics_ports, new_registry
from pdq.runtime.model import ModelSettings
from pdq.runtime.ports import FixedPort, check_ports
from pdq.runtime.process import log_ready, run_role
from pdq.runtime.settings import load
from pdq.runtime.signals import Drain


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of this process."""

    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    worker: DecodeWorkerSettings = field(default_factory=DecodeWorkerSettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    registry: RegistrySettings = field(default_factory=RegistrySettings)
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    deltas: DeltaSettings = field(default_factory=DeltaSettings)
    engine: EngineProcessSettings = field(default_factory=EngineProcessSettings)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 drained, 1 fault, 2 bad settings or machine."""
    loaded = load(Settings, argv, prog="python -m decode_worker", description="Reads prompts' KV and decodes.")
    return run_role(
        "decode", loaded.settings.runtime, functools.partial(serve, loaded.settings), cannot_start=CANNOT_START
    )


async def serve(settings: Settings, drain: Drain, worker_id: str) -> None:
    """Ports, settings, Redis, inbox, engine, registry; back in the reverse order."""
    notices = settings.notices
    inbox_port = FixedPort(host=notices.inbox_host, port=notices.inbox_port, setting="--inbox-port")
    check_ports([inbox_port, *metrics_ports(settings.runtime), *engine_ports(settings.engine)])
    engine = create_engine(settings.engine, settings.model, settings.runtime, role="consumer", worker_id=worker_id)
    metrics = new_registry()
    for collector in engine_collectors(settings.engine):
        metrics.register(collector)
    listener = MetricsListener(metrics, host=settings.runtime.metrics_host, port=settings.runtime.metrics_port)
    calls = RedisCalls(settings.redis, client_name=worker_id)
    try:
        await drain.unless_requested(calls.start_when_reachable())
        registry = RedisRegistry(calls, settings.model.name, settings.registry)
        inbox = NoticeInbox(notices, worker_id=worker_id)
        peers = NoticePeers(notices, worker_id=worker_id)
        figures = DecodeMetrics(metrics)
        deltas = DeltaSender(
            settings.deltas,
            worker_id=worker_id,
            on_overflow=lambda gateway: worker.on_gateway_overflow(gateway),
            owes=lambda gateway: worker.owes(gateway),
            on_repeat=figures.on_repeat,
        )
        try:
            info = await drain.unless_requested(start_engine(engine))
            worker = DecodeWorker(
                worker_id=worker_id,
                endpoint=inbox.endpoint,
                model=settings.model.name,
                settings=settings.worker,
                drain_grace_s=settings.runtime.drain_grace_s,
                stall_exit_s=settings.engine.engine_stall_exit_s,
                engine=engine,
                engine_info=info,
                peers=peers,
                deltas=deltas,
                metrics=figures,
                clock=asyncio.get_running_loop().time,
            )
            membership = Membership(
                registry,
                RegistryView(),
                heartbeat_s=settings.runtime.heartbeat_s,
                config={"mode": settings.model.mode},
                record=worker.record,
                on_drain=functools.partial(drain.request, "asked through the registry"),
            )
            await inbox.start(worker.on_notice)
            await drain.unless_requested(membership.join())
            log_ready(inbox=inbox.endpoint, redis=calls.connector.where, blocks=info.total_blocks)
            await worker.run(drain, membership)
            await deltas.drained(timeout_s=1)  # a live gateway acknowledges within 0.1 s
        finally:
            await engine.stop()
            await deltas.close()
            await peers.close()
            await inbox.close()
    finally:
        await calls.close()
        listener.close()
