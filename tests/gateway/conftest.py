"""A gateway on a real port over the memory queue, with stand-in workers behind real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from broker.delivery import QueueSettings
from broker.links import DeltaSettings, NoticeInbox, NoticePeers, NoticeSettings
from broker.memory import MemoryQueue, MemoryRegistry
from broker.registry_settings import RegistrySettings
from gateway.gateway import Gateway
from gateway.metrics import GatewayMetrics
from gateway.route import Way
from gateway.settings import GatewaySettings
from gateway.tokenizer import ByteTokenizer, TextTokenizer
from pdq.runtime.signals import Drain
from tests.gateway.echo_pipeline import EchoPipeline, echo_pipeline

LIMIT_S = 30


class ForgetfulQueue(MemoryQueue):
    def forget(self) -> None:
        """As a Redis that was restarted without its data."""
        MemoryQueue.__init__(self, QueueSettings())


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """For what no event tells: a heartbeat's effect, a count behind a socket."""
    async with asyncio.timeout(LIMIT_S):
        while not await holds():  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0.01)


@dataclass(slots=True, kw_only=True)
class World:
    """What a test sees."""

    gateway: Gateway
    queue: ForgetfulQueue
    registry: MemoryRegistry
    pipeline: EchoPipeline
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    metrics: CollectorRegistry
    drain: Drain
    running: asyncio.Task[None]

    @property
    def url(self) -> str:
        return self.gateway.url

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.get_sample_value(name, labels) or 0.0

    async def until(self, name: str, value: float, **labels: str) -> None:
        async def holds() -> bool:
            return self.metric(name, **labels) == value

        await eventually(holds)


@asynccontextmanager
async def world(
    settings: GatewaySettings | None = None, *, takes: bool = True, tokenizer: TextTokenizer | None = None
) -> AsyncIterator[World]:
    settings = dataclasses.replace(settings or GatewaySettings(http_port=0), local_max_tokens=0)
    queue = ForgetfulQueue(QueueSettings())
    registry = MemoryRegistry(RegistrySettings(registry_ttl_s=60))
    notices = NoticeSettings()
    inbox = NoticeInbox(notices, worker_id="gateway-test")
    peers = NoticePeers(notices, worker_id="gateway-test")
    metrics = CollectorRegistry()
    drain = Drain()
    async with echo_pipeline(queue, registry, takes=takes) as pipeline:
        gateway = Gateway(
            settings,
            gateway_id="gateway-test",
            model="sim",
            mode=Way.PULL,
            tokenizer=tokenizer or ByteTokenizer(),
            queue=queue,
            registry=registry,
            inbox=inbox,
            peers=peers,
            delta_settings=DeltaSettings(),
            metrics=GatewayMetrics(metrics),
            heartbeat_s=0.05,
            drain_grace_s=1.0,
            drain=drain,
        )
        ready = asyncio.Event()
        running = asyncio.create_task(gateway.run(ready.set))
        try:
            async with (
                httpx.AsyncClient(base_url=gateway.url, timeout=LIMIT_S) as http,
                openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
            ):
                await ready.wait()
                yield World(
                    gateway=gateway,
                    queue=queue,
                    registry=registry,
                    pipeline=pipeline,
                    http=http,
                    openai=client,
                    metrics=metrics,
                    drain=drain,
                    running=running,
                )
        finally:
            drain.request("the test is over")
            await running
            await peers.close()
            await inbox.close()


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world() as it:
        yield it
