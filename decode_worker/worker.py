"""The decode worker's centre: joins notices, engine and delta links; holds no logic beyond routing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from broker.base import WorkerRecord
from broker.links import DeltaSender, NoticePeers, NoticeReply
from broker.membership import Membership
from broker.messages import Cancel, Cancelled, KvReady, Notice, Reserve, Start
from decode_worker.admission import Admission
from decode_worker.metrics import DecodeMetrics
from decode_worker.open_requests import OpenRequests
from decode_worker.requests import RequestTable
from decode_worker.room import RoomWaiters
from decode_worker.settings import DecodeWorkerSettings
from decode_worker.token_stream import TokenStream
from engine.base import Engine, EngineInfo, EngineStats
from engine.ledger import KvLedger
from engine.progress import Progress
from engine.stall_watch import StallWatch
from pdq.runtime.signals import Drain

_EXPIRE_S: Final = 0.25
log = structlog.get_logger(__name__)


class DecodeWorker:
    def __init__(
        self,
        *,
        worker_id: str,
        endpoint: str,
        model: str,
        settings: DecodeWorkerSettings,
        drain_grace_s: float,
        stall_exit_s: float,
        engine: Engine,
        engine_info: EngineInfo,
        peers: NoticePeers,
        deltas: DeltaSender,
        metrics: DecodeMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._model = model
        self._drain_grace_s = drain_grace_s
        self._engine = engine
        self._info = engine_info
        self._metrics = metrics
        self._clock = clock
        self._stats: EngineStats | None = None
        self._progress = Progress(clock(), stall_s=settings.decode_stall_s)
        self._stepped = asyncio.Event()
        self._ledger = KvLedger(total_blocks=engine_info.total_blocks, block_size=engine_info.block_size)
        self._room = RoomWaiters(worker_id, peers)
        self._requests = OpenRequests(
            worker_id=worker_id,
            table=RequestTable(answer_memory_s=settings.answer_memory_s),
            engine=engine,
            peers=peers,
            metrics=metrics,
            clock=clock,
        )
        self._stream = TokenStream(requests=self._requests, deltas=deltas, metrics=metrics)
        self._admission = Admission(
            worker_id=worker_id,
            endpoint=endpoint,
            settings=settings,
            requests=self._requests,
            ledger=self._ledger,
            room=self._room,
            engine=engine,
            peers=peers,
            is_stalled=lambda: self._progress.is_stalled(clock()),
            on_go=self._stream.on_go,
            next_frame=deltas.next_frame,
            clock=clock,
        )
        self._stall_watch = StallWatch(
            self._progress, exit_s=stall_exit_s, clock=clock, on_stall=self._requests.fail_stalled
        )
        metrics.watch(self.record, lambda: self._stats)

    async def run(self, drain: Drain, membership: Membership) -> None:
        """Serves until the drain, then finishes what it decodes, within the grace.

        Raises an ExceptionGroup with EngineError when the engine is gone, or stands still for good; its requests are
        reported failed then.
        """
        try:
            async with asyncio.TaskGroup() as background:
                loops = (self._feed(), membership.run(), self._expire(), self._stall_watch.run())
                tasks = [background.create_task(loop) for loop in loops]
                await drain.wait()
                self._admission.is_open = False
                await asyncio.gather(membership.retire(), self._finish_open())
                for task in tasks:
                    task.cancel()
        finally:
            self._admission.is_open = False
            await asyncio.shield(self._requests.fail_all("the decode worker stopped"))
            await membership.leave()

    def on_notice(self, message: Notice, reply: NoticeReply) -> None:
        """The inbox's handler."""
        match message:
            case KvReady() | Reserve() | Start():
                self._admission.on_offer(message, reply)
            case Cancel():
                self._admission.on_cancel(message)
                reply(Cancelled(request_id=message.request_id, pair=message.pair))
            case _:
                log.warning("unexpected_notice", kind=type(message).__name__)

    def on_gateway_overflow(self, endpoint: str) -> None:
        """A gateway acknowledges nothing any more: what it asked for would be decoded for nobody."""
        for request in self._requests.table.of_gateway(endpoint):
            log.warning("gateway_overflow", request_id=request.offer.request_id, gateway=endpoint)
            self._requests.abort(request, reason="the gateway acknowledges nothing")

    def owes(self, gateway: str) -> tuple[str, ...]:
        """Ids of all requests that are open for this gateway endpoint, with or without Go."""
        return tuple([request.offer.request_id for request in self._requests.table.of_gateway(gateway)])

    def record(self) -> WorkerRecord:
        """What the next heartbeat says."""
        stats = self._stats
        return WorkerRecord(
            worker_id=self._worker_id,
            role="decode",
            state=self._state(),
            endpoint=self._endpoint,
            model=self._model,
            fingerprint=self._info.fingerprint,
            engine_id=self._info.engine_id,
            epoch=self._info.epoch,
            total_blocks=self._info.total_blocks,
            free_blocks=self._ledger.free_blocks,
            block_size=self._info.block_size,
            max_model_len=self._info.max_model_len,
            capabilities=" ".join(self._info.capabilities),
            running=stats.running if stats else 0,
            waiting=stats.waiting if stats else 0,
            done_tokens=self._metrics.num_tokens,
            clock_ms=int(self._clock() * 1000),
        )

    def _state(self) -> str:
        if not self._admission.is_open:
            return "draining"
        return "stalled" if self._progress.is_stalled(self._clock()) else "ready"

    async def _feed(self) -> None:
        async for step in self._engine.outputs():
            self._stats = step.stats
            # Requests that wait for their KV make no step: P may be slow, and has a time limit of its own.
            self._progress.observe(step.stats.step, is_idle=step.stats.running == 0, now=self._clock())
            self._stream.on_step(step)
            released = [self._ledger.release(engine_request_id) for engine_request_id in step.released]
            if any(released):
                self._room.tell(self._ledger.free_tokens)
            self._stepped.set()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_S)
            self._requests.expire()

    async def _finish_open(self) -> None:
        log.info("draining", requests=len(self._requests.table))
        try:
            async with asyncio.timeout(self._drain_grace_s):
                while len(self._requests.table):
                    self._stepped.clear()
                    await self._stepped.wait()
        except TimeoutError:
            log.warning("drain_grace_over", requests=len(self._requests.table))
