"""A whole decode worker over twins: an engine in the test's hands, and a gateway that says Go to everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from broker.links import (
    DeltaReceiver,
    DeltaSender,
    DeltaSettings,
    NoticeInbox,
    NoticePeers,
    NoticeReply,
    NoticeSettings,
)
from broker.membership import Membership, RegistryView
from broker.memory import MemoryRegistry
from broker.messages import Ack, Admit, Delta, Deltas, Failed, Go, Notice, Start
from decode_worker.metrics import DecodeMetrics
from decode_worker.settings import DecodeWorkerSettings
from decode_worker.worker import DecodeWorker
from pdq.runtime.signals import Drain
from pdq.wire.types import Pair, SamplingParams, pack_ids
from tests.broker.stores import eventually
from tests.workers.live_engine import INFO, LiveEngine

DELTAS = DeltaSettings(sign_of_life_s=0.1, delta_ack_s=0.01, delta_give_up_s=600.0)
PATIENT = NoticeSettings(notice_timeout_s=30.0, notice_tries=1)
"""Everybody here answers, however late: nothing has to be said twice."""


@dataclass(slots=True, kw_only=True)
class World:
    worker: DecodeWorker
    endpoint: str
    """Of the worker."""
    engine: LiveEngine
    registry: MemoryRegistry
    metrics: CollectorRegistry
    drain: Drain
    running: asyncio.Task[None]
    gateway: NoticeInbox
    peers: NoticePeers
    """The gateway's."""
    receiver: DeltaReceiver
    admits: list[Admit] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    lists: list[tuple[str, ...]] = field(default_factory=list)

    def on_notice(self, notice: Notice, reply: NoticeReply) -> None:
        match notice:
            case Admit():
                self.admits.append(notice)
                reply(Go(request_id=notice.request_id, pair=notice.pair))
            case Failed():
                self.failed.append(notice)
                reply(Ack(request_id=notice.request_id, pair=notice.pair))
            case Deltas():
                if self.receiver.feed(notice, reply):
                    self.deltas += notice.items
                    self.lists += [] if notice.owes is None else [notice.owes]

    async def start(self, request_id: str, *, gen: int = 1, num_tokens: int = 4) -> Notice:
        """What the worker says to a request that it shall prefill by itself."""
        return await self.peers.request(
            self.endpoint,
            Start(
                request_id=request_id,
                pair=Pair(gen=gen, attempt=0),
                remaining_s=60.0,
                prompt_ids=pack_ids(range(num_tokens)),
                generated_ids=b"",
                sampling=SamplingParams(max_tokens=8),
                gateway=self.gateway.endpoint,
                gateway_id="gateway-1",
            ),
        )

    async def until(self, is_true: Callable[[], bool]) -> None:
        async def holds() -> bool:
            return is_true()

        await eventually(holds)

    async def state(self) -> str:
        """As the registry has it; empty: gone."""
        return next((w.state for w in await self.registry.workers() if w.worker_id == "decode-1"), "")


@asynccontextmanager
async def decode_world(*, stall_exit_s: float = 60.0, **changes: Any) -> AsyncIterator[World]:
    """`changes`: of DecodeWorkerSettings."""
    notices = PATIENT
    inbox, gateway = (NoticeInbox(notices, worker_id=name) for name in ("decode-1", "gateway-1"))
    own_peers, gateway_peers = (NoticePeers(notices, worker_id=name) for name in ("decode-1", "gateway-1"))
    registry, metrics, drain, engine = MemoryRegistry(), CollectorRegistry(), Drain(), LiveEngine()
    sender = DeltaSender(
        DELTAS,
        worker_id="decode-1",
        on_overflow=lambda endpoint: worker.on_gateway_overflow(endpoint),
        owes=lambda endpoint: worker.owes(endpoint),
    )
    worker = DecodeWorker(
        worker_id="decode-1",
        endpoint=inbox.endpoint,
        model="m",
        settings=DecodeWorkerSettings(**{"admit_tries": 1, **changes}),
        drain_grace_s=5.0,
        stall_exit_s=stall_exit_s,
        engine=engine,
        engine_info=INFO,
        peers=own_peers,
        deltas=sender,
        metrics=DecodeMetrics(metrics),
        clock=asyncio.get_running_loop().time,
    )
    membership = Membership(
        registry, RegistryView(), heartbeat_s=0.05, config={}, record=worker.record, on_drain=lambda: None
    )
    await inbox.start(worker.on_notice)
    await membership.join(patience_s=0)
    running = asyncio.create_task(worker.run(drain, membership))
    world = World(
        worker=worker,
        endpoint=inbox.endpoint,
        engine=engine,
        registry=registry,
        metrics=metrics,
        drain=drain,
        running=running,
        gateway=gateway,
        peers=gateway_peers,
        receiver=DeltaReceiver(DELTAS),
    )
    await gateway.start(world.on_notice)
    try:
        yield world
        if not running.done():
            drain.request("the test is over")
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await sender.close()
        await world.receiver.close()
        for peers in (own_peers, gateway_peers):
            await peers.close()
        for closing in (inbox, gateway):
            await closing.close()
