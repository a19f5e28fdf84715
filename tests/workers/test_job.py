"""One job from lease to settlement: what happens to the KV whatever the other sides say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest
from prometheus_client import CollectorRegistry

from broker.base import JobLease, WorkerRecord
from broker.delivery import QueueSettings
from broker.errors import QueueUnavailable
from broker.links import NoticeInbox, NoticePeers, NoticeReply, NoticeSettings
from broker.membership import RegistryView
from broker.memory import MemoryQueue
from broker.messages import Accepted, Busy, Gone, KvReady, Notice, Reserve
from engine.base import EngineError, EngineInfo, EngineOutput, EngineRequest, PushKv, StepOutputs
from pdq.wire.types import KvSource, KvTicket, Pair, pack_ids
from prefill_worker.ends import JobEnds
from prefill_worker.handover import Handover
from prefill_worker.held import HeldJob, JobOutcome
from prefill_worker.job import JobRunner
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.settings import PrefillWorkerSettings
from tests.broker.stores import job

SOURCE = KvSource(engine_id="e", epoch="x", host="127.0.0.1", port=1, tp_size=1, block_size=16)


class TwinEngine:
    """Prefills at once; remembers who was released and aborted."""

    def __init__(self) -> None:
        self.submitted: list[EngineRequest] = []
        self.on_submit: Callable[[EngineRequest], None] = lambda _: None
        self.released: list[str] = []
        self.aborted: list[str] = []

    async def start(self) -> EngineInfo:
        raise AssertionError("not started in these tests")

    async def submit(self, request: EngineRequest) -> None:
        self.submitted.append(request)
        self.on_submit(request)

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        return
        yield

    async def abort(self, engine_request_id: str) -> None:
        self.aborted.append(engine_request_id)

    async def release(self, engine_request_id: str) -> None:
        self.released.append(engine_request_id)

    async def stop(self) -> None:
        pass


class DeadEngine(TwinEngine):
    """Its process has ended, and the worker doesn't know yet."""

    def __init__(self, *, dies_after_submit: bool = False) -> None:
        super().__init__()
        self._dies_after_submit = dies_after_submit

    async def submit(self, request: EngineRequest) -> None:
        if not self._dies_after_submit:
            raise EngineError("the engine is not running")
        self.on_submit(request)

    async def abort(self, engine_request_id: str) -> None:
        raise EngineError("the engine is not running")

    async def release(self, engine_request_id: str) -> None:
        raise EngineError("the engine is not running")


class UnsettledQueue(MemoryQueue):
    """The store is gone when the job is to be settled."""

    async def settle(self, lease: JobLease, *, state: str, decode_worker: str = "") -> bool:
        raise QueueUnavailable("down")


class World:
    """A queue with one taken job, an engine, and a decode worker whose answer the test chooses."""

    def __init__(
        self, queue: MemoryQueue, answer: type[Accepted] | type[Busy] | type[Gone], *, fingerprint: str = ""
    ) -> None:
        """`fingerprint`: the prefill worker's; the decode worker's is empty."""
        self.queue = queue
        self._fingerprint = fingerprint
        self.engine: TwinEngine = TwinEngine()
        self.settings = PrefillWorkerSettings(park_s=0.05, park_retry_s=0.02)
        self._answer = answer
        self.offers: list[KvReady | Reserve] = []

    async def run(self, *, error: str | None = None, mode: str = "pull") -> HeldJob:
        """The job to its end."""
        notices = NoticeSettings()
        inbox = NoticeInbox(notices, worker_id="decode-1")
        await inbox.start(self._on_notice)
        peers = NoticePeers(notices, worker_id="prefill-1")
        clock = asyncio.get_running_loop().time
        view = RegistryView()
        view.workers = (decode_record(inbox.endpoint),)
        try:
            handover = Handover(
                peers=peers,
                view=view,
                fingerprint=self._fingerprint,
                settings=self.settings,
                clock=clock,
                rng=random.Random(1),
            )
            runner = JobRunner(
                worker_id="prefill-1",
                endpoint="tcp://127.0.0.1:1",
                kv_source=SOURCE,
                ends=JobEnds(worker_id="prefill-1", queue=self.queue, engine=self.engine, peers=peers),
                engine=self.engine,
                peers=peers,
                handover=handover,
                metrics=PrefillMetrics(CollectorRegistry()),
                clock=clock,
            )
            await self.queue.enqueue(job("r1", tokens=3, mode=mode))
            (lease,) = (await self.queue.take("prefill-1", max_tokens=100, max_jobs=1)).leases
            held = HeldJob(lease=lease, taken_at=clock())
            self.engine.on_submit = lambda _: held.prefilled.set_result(output(held, error))
            async with asyncio.timeout(10):
                await runner.run(held)
            return held
        finally:
            await peers.close()
            await inbox.close()

    def _on_notice(self, notice: Notice, reply: NoticeReply) -> None:
        if isinstance(notice, KvReady | Reserve):
            self.offers.append(notice)
            more: dict[str, object] = {Gone: {"reason": "answered"}, Busy: {"free_tokens": 0}}.get(self._answer, {})
            reply(self._answer(request_id=notice.request_id, pair=notice.pair, **more))


def decode_record(endpoint: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id="decode-1",
        role="decode",
        state="ready",
        endpoint=endpoint,
        model="sim",
        fingerprint="",
        total_blocks=100,
        free_blocks=100,
        block_size=16,
    )


def output(held: HeldJob, error: str | None) -> EngineOutput:
    if error is not None:
        return EngineOutput(engine_request_id=held.engine_request_id, error=error)
    ticket = KvTicket(
        transfer_id="r1",
        pair=Pair(gen=1, attempt=1),
        engine_id="e",
        epoch="x",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        block_size=16,
        num_tokens=3,
        block_ids=pack_ids([0]),
    )
    return EngineOutput(engine_request_id=held.engine_request_id, finish="prefilled", ticket=ticket)


async def test_accepted_settles_the_job_and_leaves_the_kv_to_its_reader() -> None:
    world = World(MemoryQueue(QueueSettings()), Accepted)

    await world.run()

    assert (await world.queue.depth()).running == 0
    assert world.engine.released == world.engine.aborted == []


async def test_a_queue_that_is_down_at_the_settle_does_not_take_the_kv_from_its_reader() -> None:
    world = World(UnsettledQueue(QueueSettings()), Accepted)

    await world.run()

    assert world.engine.released == world.engine.aborted == []


async def test_gone_settles_the_job_and_releases_the_kv() -> None:
    world = World(MemoryQueue(QueueSettings()), Gone)

    held = await world.run()

    assert (await world.queue.depth()).running == 0
    assert world.engine.released == [held.engine_request_id]


async def test_with_every_decode_worker_busy_the_job_goes_back_without_a_failure_and_its_kv_is_released() -> None:
    world = World(MemoryQueue(QueueSettings()), Busy)

    held = await world.run()

    (again,) = (await world.queue.take("prefill-2", max_tokens=100, max_jobs=1)).leases
    assert (again.failures, again.pair.attempt) == (0, 2)
    assert world.engine.released == [held.engine_request_id]


@pytest.mark.parametrize("error", ["engine_error: out of memory", "kv_transfer_failed: gone"])
async def test_an_engine_failure_gives_the_job_back_as_a_failure(error: str) -> None:
    world = World(MemoryQueue(QueueSettings()), Accepted)

    await world.run(error=error)

    (again,) = (await world.queue.take("prefill-2", max_tokens=100, max_jobs=1)).leases
    assert again.failures == 1
    assert world.engine.released == world.engine.aborted == []


async def test_push_reserves_before_it_computes_and_tells_what_it_took_before_it_settles() -> None:
    world = World(MemoryQueue(QueueSettings()), Accepted)

    await world.run(mode="push")

    reserve, ready = world.offers
    assert isinstance(reserve, Reserve)
    assert reserve.source == SOURCE
    assert isinstance(ready, KvReady)
    assert ready.ticket is None
    assert [request.kv for request in world.engine.submitted] == [PushKv()]
    assert (await world.queue.depth()).running == 0
    assert world.engine.released == world.engine.aborted == []


async def test_push_with_every_decode_worker_busy_computes_nothing_and_gives_the_job_back() -> None:
    world = World(MemoryQueue(QueueSettings()), Busy)

    await world.run(mode="push")

    assert world.engine.submitted == []
    assert (await world.queue.depth()).queued == 1


async def test_push_of_a_request_that_is_gone_computes_nothing_and_settles() -> None:
    world = World(MemoryQueue(QueueSettings()), Gone)

    await world.run(mode="push")

    depth = await world.queue.depth()
    assert world.engine.submitted == []
    assert (depth.queued, depth.running, depth.dead) == (0, 0, 0)


async def test_an_engine_that_has_just_died_gives_the_job_back_at_once() -> None:
    world = World(MemoryQueue(QueueSettings()), Accepted)
    world.engine = DeadEngine()

    held = await world.run()

    assert held.outcome is JobOutcome.FAILED
    (again,) = (await world.queue.take("prefill-2", max_tokens=100, max_jobs=1)).leases
    assert again.failures == 1


async def test_an_engine_that_dies_while_no_decode_worker_has_room_is_no_crash_of_the_job() -> None:
    world = World(MemoryQueue(QueueSettings()), Busy)
    world.engine = DeadEngine(dies_after_submit=True)

    held = await world.run()

    assert held.outcome is JobOutcome.NO_ROOM


async def test_a_decode_worker_that_does_not_fit_is_never_asked() -> None:
    world = World(MemoryQueue(QueueSettings()), Accepted, fingerprint="dtype=bfloat16")

    held = await world.run()

    assert world.offers == []
    assert held.outcome is JobOutcome.NO_ROOM
    assert (await world.queue.depth()).queued == 1
    assert world.engine.released == [held.engine_request_id]


@pytest.mark.parametrize(
    ("answer", "error", "outcome"),
    [
        (Accepted, None, JobOutcome.HANDED_OVER),
        (Gone, None, JobOutcome.GONE),
        (Busy, None, JobOutcome.NO_ROOM),
        (Accepted, "engine_error: out of memory", JobOutcome.FAILED),
    ],
)
async def test_a_job_says_how_it_left_the_worker(
    answer: type[Accepted] | type[Busy] | type[Gone], error: str | None, outcome: JobOutcome
) -> None:
    held = await World(MemoryQueue(QueueSettings()), answer).run(error=error)

    assert held.outcome is outcome
