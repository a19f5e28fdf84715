"""A whole prefill worker over twins: a queue that can go away, an engine, decode workers' and gateways' one inbox."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from broker.base import DeadJob, JobLease, Reaped, WorkerRecord
from broker.delivery import QueueSettings
from broker.errors import QueueUnavailable
from broker.links import NoticeInbox, NoticePeers, NoticeReply, NoticeSettings
from broker.membership import Membership, RegistryView
from broker.memory import MemoryQueue, MemoryRegistry
from broker.messages import Accepted, Ack, Busy, Failed, Gone, KvReady, Notice, Reserve
from broker.registry_settings import RegistrySettings
from pdq.runtime.signals import Drain
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.settings import PrefillWorkerSettings
from prefill_worker.worker import PrefillWorker
from tests.broker.stores import eventually
from tests.workers.live_engine import INFO, LiveEngine

RENEWAL_S = 0.2
"""So soon a worker sees that it has lost a job. Its leases last far longer: a busy machine costs none."""
LEASE_S = 60.0
ONE_BEAT_LASTS = RegistrySettings(registry_ttl_s=600.0)
"""The decode worker's: it gives no other."""


class MovableQueue(MemoryQueue):
    """`is_away`: as a Redis that can't be reached; nothing runs there then."""

    is_away = False

    def __init__(self, settings: QueueSettings) -> None:
        super().__init__(settings, clock=lambda: time.monotonic() + self.ahead_s)
        self.ahead_s = 0.0
        """Time that has passed for the queue only."""
        self.refused: list[str] = []
        """Calls that came while it was away."""

    async def settle(self, lease: JobLease, *, state: str, decode_worker: str = "") -> bool:
        self._check("settle")
        return await super().settle(lease, state=state, decode_worker=decode_worker)

    async def give_back(self, lease: JobLease, *, failure: str | None) -> DeadJob | None:
        self._check("give_back")
        return await super().give_back(lease, failure=failure)

    async def renew(self, leases: tuple[JobLease, ...]) -> tuple[bool, ...]:
        self._check("renew")
        return await super().renew(leases)

    async def take(self, owner: str, **limits: Any) -> Any:
        self._check("take")
        return await super().take(owner, **limits)

    async def reap(self) -> Reaped:
        self._check("reap")
        return await super().reap()

    def forget_take(self, request_id: str, gen: int) -> None:
        """As a Redis that came back from a snapshot in which this job still waited."""
        request = self._requests[request_id, gen]
        request.attempt, request.state = request.attempt - 1, "queued"
        self._entries[request.entry_id].owner = None
        self._announce()

    def _check(self, call: str) -> None:
        if self.is_away:
            self.refused.append(call)
            raise QueueUnavailable("away")


@dataclass(slots=True, kw_only=True)
class World:
    worker: PrefillWorker
    queue: MovableQueue
    registry: MemoryRegistry
    engine: LiveEngine
    endpoint: str
    """Of the inbox of decode worker and gateway."""
    metrics: CollectorRegistry
    drain: Drain
    running: asyncio.Task[None]
    answer: Callable[[KvReady | Reserve], Notice]
    offers: list[KvReady | Reserve] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)

    def on_notice(self, notice: Notice, reply: NoticeReply) -> None:
        if isinstance(notice, KvReady | Reserve):
            self.offers.append(notice)
            answer = self.answer(notice)
            if isinstance(answer, Accepted) and isinstance(notice, KvReady) and notice.ticket is not None:
                self.engine.free(f"{notice.request_id}:{notice.pair.gen}:{notice.pair.attempt}")  # it was read
            reply(answer)
        elif isinstance(notice, Failed):
            self.failed.append(notice)
            reply(Ack(request_id=notice.request_id, pair=notice.pair))

    def state(self, request_id: str, gen: int = 1) -> str | None:
        return self.queue.state_of(request_id, gen)

    async def until(self, is_true: Callable[[], bool]) -> None:
        async def holds() -> bool:
            if self.running.done():
                self.running.result()
            return is_true()

        await eventually(holds)

    @property
    def is_back_at_start(self) -> bool:
        """No job, and every block unpromised."""
        record = self.worker.record()
        return self.metrics.get_sample_value("pdq_prefill_leases") == 0 and record.free_blocks == record.total_blocks


def accepted(offer: KvReady | Reserve) -> Notice:
    return Accepted(request_id=offer.request_id, pair=offer.pair)


def busy(offer: KvReady | Reserve) -> Notice:
    return Busy(request_id=offer.request_id, pair=offer.pair, free_tokens=0)


def gone(offer: KvReady | Reserve) -> Notice:
    return Gone(request_id=offer.request_id, pair=offer.pair, reason="as scripted")


@asynccontextmanager
async def prefill_world(
    answer: Callable[[KvReady | Reserve], Notice] = accepted,
    *,
    engine: LiveEngine | None = None,
    stall_exit_s: float = 60.0,
    drain_grace_s: float = 5.0,
    **changes: Any,
) -> AsyncIterator[World]:
    """`changes`: of PrefillWorkerSettings."""
    notices = NoticeSettings(notice_timeout_s=30.0, notice_tries=1)  # everybody answers: nothing is said twice
    inbox = NoticeInbox(notices, worker_id="decode-1")
    peers = NoticePeers(notices, worker_id="prefill-1")
    queue, registry = MovableQueue(QueueSettings(lease_s=LEASE_S)), MemoryRegistry(ONE_BEAT_LASTS)
    engine = engine or LiveEngine()
    view, metrics, drain = RegistryView(), CollectorRegistry(), Drain()
    worker = PrefillWorker(
        worker_id="prefill-1",
        endpoint="tcp://127.0.0.1:1",
        model="m",
        settings=PrefillWorkerSettings(**{"park_s": 0.05, "park_retry_s": 0.02, **changes}),
        drain_grace_s=drain_grace_s,
        stall_exit_s=stall_exit_s,
        lease_s=3 * RENEWAL_S,
        queue=queue,
        engine=engine,
        engine_info=INFO,
        peers=peers,
        view=view,
        metrics=PrefillMetrics(metrics),
        clock=asyncio.get_running_loop().time,
        rng=random.Random(1),
    )
    membership = Membership(registry, view, heartbeat_s=0.05, config={}, record=worker.record, on_drain=lambda: None)
    await registry.heartbeat(_decode_record(inbox.endpoint))
    await membership.join(patience_s=0)
    running = asyncio.create_task(worker.run(drain, membership))
    world = World(
        worker=worker,
        queue=queue,
        registry=registry,
        engine=engine,
        endpoint=inbox.endpoint,
        metrics=metrics,
        drain=drain,
        running=running,
        answer=answer,
    )
    await inbox.start(world.on_notice)
    try:
        yield world
        if not running.done():
            drain.request("the test is over")
            await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await peers.close()
        await inbox.close()


def _decode_record(endpoint: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id="decode-1",
        role="decode",
        state="ready",
        endpoint=endpoint,
        model="m",
        fingerprint=INFO.fingerprint,
        total_blocks=100,
        free_blocks=100,
        block_size=16,
    )
