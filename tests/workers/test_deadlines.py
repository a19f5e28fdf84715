"""A request's deadline at the workers: said anew with each offer, and past it nobody computes or decodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from broker.delivery import QueueSettings
from broker.links import NoticeInbox, NoticePeers, NoticeReply, NoticeSettings
from broker.memory import MemoryQueue
from broker.messages import Accepted, Ack, Admit, Busy, Failed, Go, Gone, Notice
from decode_worker.admission import Admission
from decode_worker.metrics import DecodeMetrics
from decode_worker.open_requests import OpenRequests
from decode_worker.requests import RequestTable
from decode_worker.room import RoomWaiters
from decode_worker.settings import DecodeWorkerSettings
from engine.ledger import KvLedger
from prefill_worker.held import JobOutcome
from prefill_worker.settings import PrefillWorkerSettings
from tests.broker.stores import LIMIT_S, eventually, job
from tests.workers.job_world import TwinEngine, World
from tests.workers.prefill_world import prefill_world
from tests.workers.test_requests import kv_ready

PATIENT = NoticeSettings(notice_timeout_s=LIMIT_S, notice_tries=1)
NOBODY = NoticeSettings(notice_timeout_s=0.2)
"""For a gateway that is not there."""


async def test_each_offer_says_how_much_time_is_left_now() -> None:
    world = World(MemoryQueue(QueueSettings()), Busy)
    world.settings = PrefillWorkerSettings(park_s=60.0, park_retry_s=0.05)
    world.num_refused = 2

    await world.run(deadline_s=60.0)

    remaining = [offer.remaining_s for offer in world.offers]
    assert len(remaining) == 3
    assert remaining[0] - remaining[-1] >= 0.05
    assert remaining == sorted(remaining, reverse=True)


async def test_a_prefill_whose_deadline_passes_while_it_is_parked_is_dropped_and_its_gateway_hears_of_it() -> None:
    world = World(MemoryQueue(QueueSettings()), Busy)
    world.settings = PrefillWorkerSettings(park_s=30.0, park_retry_s=30.0)

    held = await world.run(deadline_s=0.2)

    depth = await world.queue.depth()
    assert held.outcome is JobOutcome.EXPIRED
    assert (depth.queued, depth.running) == (0, 0)
    assert world.queue.state_of("r1", 1) == "deadline"
    assert world.engine.released == [held.engine_request_id]
    assert [(failed.code, failed.retryable) for failed in world.failed] == [("deadline_exceeded", False)]


async def test_a_push_whose_deadline_passes_before_a_place_was_found_computes_nothing() -> None:
    world = World(MemoryQueue(QueueSettings()), Busy)
    world.settings = PrefillWorkerSettings(park_s=30.0, park_retry_s=30.0)

    held = await world.run(mode="push", deadline_s=0.2)

    assert held.outcome is JobOutcome.EXPIRED
    assert world.engine.submitted == []


@dataclass(slots=True, kw_only=True)
class DecodeWorld:
    """Admission with a gateway that says Go, and a clock that the test sets."""

    now: float = 1000.0
    engine: TwinEngine = field(default_factory=TwinEngine)
    answers: list[Notice] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    gateway: str = ""
    admission: Admission
    requests: OpenRequests

    async def offer(self, remaining_s: float) -> Notice:
        """What D answers."""
        answered: asyncio.Future[Notice] = asyncio.get_running_loop().create_future()

        def reply(answer: Notice) -> bool:
            answered.set_result(answer)
            return True

        self.admission.on_offer(kv_ready(gateway=self.gateway, remaining_s=remaining_s), reply)
        async with asyncio.timeout(LIMIT_S):
            return await answered


@asynccontextmanager
async def decode_world(notices: NoticeSettings = PATIENT) -> AsyncIterator[DecodeWorld]:
    inbox = NoticeInbox(notices, worker_id="gateway-1")
    peers = NoticePeers(notices, worker_id="decode-1")
    engine = TwinEngine()

    def on_notice(notice: Notice, reply: NoticeReply) -> None:
        if isinstance(notice, Admit):
            reply(Go(request_id=notice.request_id, pair=notice.pair))
        elif isinstance(notice, Failed):
            world.failed.append(notice)
            reply(Ack(request_id=notice.request_id, pair=notice.pair))

    def clock() -> float:
        return world.now

    requests = OpenRequests(
        worker_id="decode-1",
        table=RequestTable(answer_memory_s=20.0),
        engine=engine,
        peers=peers,
        metrics=DecodeMetrics(CollectorRegistry()),
        clock=clock,
    )
    admission = Admission(
        worker_id="decode-1",
        endpoint="tcp://127.0.0.1:1",
        settings=DecodeWorkerSettings(),
        requests=requests,
        ledger=KvLedger(total_blocks=100, block_size=16),
        room=RoomWaiters("decode-1", peers),
        engine=engine,
        peers=peers,
        is_stalled=lambda: False,
        on_go=lambda request, held_back: None,
        next_frame=lambda gateway: 1,
        clock=clock,
    )
    world = DecodeWorld(engine=engine, gateway=inbox.endpoint, admission=admission, requests=requests)
    await inbox.start(on_notice)
    try:
        yield world
    finally:
        await peers.close()
        await inbox.close()


async def test_a_prefill_that_is_offered_without_time_left_is_gone_and_its_kv_never_read() -> None:
    async with decode_world() as world:
        answer = await world.offer(0.0)

    assert isinstance(answer, Gone)
    assert answer.reason == "deadline passed"
    assert world.engine.submitted == []


async def test_a_decode_ends_at_its_deadline_also_when_no_gateway_cancels_it() -> None:
    async with decode_world() as world:
        assert isinstance(await world.offer(30.0), Accepted)

        world.now += 30.5
        world.requests.expire()
        assert len(world.requests.table) == 1, "the gateway answers and cancels first"
        world.now += 1.0
        world.requests.expire()

        assert len(world.requests.table) == 0

        async def is_told() -> bool:
            return bool(world.failed and world.engine.aborted)

        await eventually(is_told)
        assert [(failed.code, failed.retryable) for failed in world.failed] == [("deadline_exceeded", False)]
        assert world.engine.aborted == ["r:1:1"]
        assert isinstance(await world.offer(30.0), Gone), "a late repeat starts nothing"


async def test_a_request_that_waits_for_go_ends_at_its_deadline_too() -> None:
    async with decode_world(NOBODY) as world:
        world.gateway = "tcp://127.0.0.1:1"  # nobody there
        offering = asyncio.create_task(world.offer(30.0))

        async def is_open() -> bool:
            return len(world.requests.table) == 1

        await eventually(is_open)
        world.now += 31.1
        world.requests.expire()

        assert isinstance(await offering, Gone)


def test_a_table_knows_whose_deadline_has_passed() -> None:
    table = RequestTable(answer_memory_s=20)
    early, _ = table.open(kv_ready("a", remaining_s=5.0), now=10.0)
    table.open(kv_ready("b", remaining_s=6.0), now=10.0)

    assert table.expired(14.9) == []
    assert table.expired(15.0) == [early]


async def test_a_deadline_that_passed_in_the_queue_has_the_same_name_as_everywhere() -> None:
    async with prefill_world() as world:
        await world.queue.enqueue(job("late", deadline_s=0.0, gateway=world.endpoint))
        await world.until(lambda: bool(world.failed))

    assert [(failed.code, failed.retryable) for failed in world.failed] == [("deadline_exceeded", False)]
