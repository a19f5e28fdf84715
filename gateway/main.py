"""Start-up and shutdown of a gateway process, in the order in which they happen."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.delivery import QueueSettings
from broker.errors import CANNOT_START
from broker.links import DeltaSettings, NoticeInbox, NoticePeers, NoticeSettings
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_queue import RedisPrefillQueue
from broker.redis_registry import RedisRegistry
from broker.registry_settings import RegistrySettings
from gateway.gateway import Gateway
from gateway.metrics import GatewayMetrics
from gateway.route import Way
from gateway.settings import GatewaySettings
from gateway.tokenizer import load_tokenizer
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
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    registry: RegistrySettings = field(default_factory=RegistrySettings)
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    deltas: DeltaSettings = field(default_factory=DeltaSettings)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 drained, 1 fault, 2 bad settings or machine."""
    loaded = load(Settings, argv, prog="python -m gateway", description="Serves the OpenAI API; queues the prompts.")
    return run_role(
        "gateway",
        loaded.settings.runtime,
        functools.partial(serve, loaded.settings),
        cannot_start=CANNOT_START,
    )


async def serve(settings: Settings, drain: Drain, worker_id: str) -> None:
    """Ports, tokenizer, Redis, inbox, HTTP; back in the reverse order."""
    own, notices, runtime = settings.gateway, settings.notices, settings.runtime
    check_ports(
        [
            FixedPort(host=own.http_host, port=own.http_port, setting="--http-port"),
            FixedPort(host=notices.inbox_host, port=notices.inbox_port, setting="--inbox-port"),
            *metrics_ports(runtime),
        ]
    )
    tokenizer = await asyncio.to_thread(load_tokenizer, settings.model)
    registry = new_registry()
    listener = MetricsListener(registry, host=runtime.metrics_host, port=runtime.metrics_port)
    calls = RedisCalls(settings.redis, client_name=worker_id)
    try:
        await drain.unless_requested(calls.start_when_reachable())
        queue = RedisPrefillQueue(calls, settings.model.name, settings.queue)
        inbox = NoticeInbox(notices, worker_id=worker_id)
        peers = NoticePeers(notices, worker_id=worker_id)
        try:
            gateway = Gateway(
                own,
                gateway_id=worker_id,
                model=settings.model.name,
                mode=Way(settings.model.mode),
                tokenizer=tokenizer,
                queue=queue,
                registry=RedisRegistry(calls, settings.model.name, settings.registry),
                inbox=inbox,
                peers=peers,
                delta_settings=settings.deltas,
                metrics=GatewayMetrics(registry),
                heartbeat_s=runtime.heartbeat_s,
                drain_grace_s=runtime.drain_grace_s,
                drain=drain,
            )
            await gateway.run(lambda: log_ready(http=gateway.url, inbox=inbox.endpoint, redis=calls.connector.where))
        finally:
            await peers.close()
            await inbox.close()
            await queue.close()
    finally:
        await calls.close()
        listener.close()
