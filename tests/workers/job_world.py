"""One taken job in a world of twins: queue, engine, and a decode worker whose answer the test chooses."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

from prometheus_client import CollectorRegistry

from broker.base import WorkerRecord
from broker.links import NoticeInbox, NoticePeers, NoticeReply, NoticeSettings
from broker.membership import RegistryView
from broker.memory import MemoryQueue
from broker.messages import Accepted, Ack, Busy, Failed, Gone, KvReady, Notice, Reserve
from engine.base import EngineError, EngineInfo, EngineOutput, EngineRequest, StepOutputs
from pdq.wire.types import KvSource, KvTicket, Pair, pack_ids
from prefill_worker.ends import JobEnds
from prefill_worker.handover import Handover
from prefill_worker.held import HeldJob
from prefill_worker.job import JobRunner
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.settings import PrefillWorkerSettings
from tests.broker.stores import LIMIT_S, job

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
        self.num_refused: int | None = None
        """So many offers are answered as said, the next ones with Accepted; None: all of them."""
        self.failed: list[Failed] = []
        """What the gateway was told."""

    async def run(self, *, error: str | None = None, mode: str = "pull", deadline_s: float = 600.0) -> HeldJob:
        """The job to its end."""
        notices = NoticeSettings(notice_timeout_s=LIMIT_S, notice_tries=1)  # everybody answers: no offer comes twice
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
            metrics = PrefillMetrics(CollectorRegistry())
            runner = JobRunner(
                worker_id="prefill-1",
                endpoint="tcp://127.0.0.1:1",
                kv_source=SOURCE,
                ends=JobEnds(worker_id="prefill-1", queue=self.queue, engine=self.engine, peers=peers, metrics=metrics),
                engine=self.engine,
                peers=peers,
                handover=handover,
                metrics=metrics,
                clock=clock,
            )
            await self.queue.enqueue(job("r1", tokens=3, mode=mode, gateway=inbox.endpoint, deadline_s=deadline_s))
            (lease,) = (await self.queue.take("prefill-1", max_tokens=100, max_jobs=1)).leases
            held = HeldJob(lease=lease, taken_at=clock())
            self.engine.on_submit = lambda _: held.prefilled.set_result(output(held, error))
            async with asyncio.timeout(LIMIT_S):
                await runner.run(held)
            return held
        finally:
            await peers.close()
            await inbox.close()

    def _on_notice(self, notice: Notice, reply: NoticeReply) -> None:
        if isinstance(notice, KvReady | Reserve):
            self.offers.append(notice)
            is_over = self.num_refused is not None and len(self.offers) > self.num_refused
            answer = Accepted if is_over else self._answer
            more: dict[str, object] = {Gone: {"reason": "answered"}, Busy: {"free_tokens": 0}}.get(answer, {})
            reply(answer(request_id=notice.request_id, pair=notice.pair, **more))
        elif isinstance(notice, Failed):
            self.failed.append(notice)
            reply(Ack(request_id=notice.request_id, pair=notice.pair))


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
