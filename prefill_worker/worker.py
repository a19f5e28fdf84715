"""The prefill worker's centre: joins queue, engine and notices; holds no logic of its own beyond routing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import structlog

from broker.base import DeadJob, JobLease, PrefillQueue, WorkerRecord
from broker.errors import QueueUnavailable
from broker.links import NoticePeers, NoticeReply
from broker.membership import Membership, RegistryView
from broker.messages import Cancel, Cancelled, Notice, Room
from engine.base import Engine, EngineInfo, EngineOutput, EngineStats, StepOutputs
from engine.ledger import KvLedger
from engine.progress import Progress
from engine.stall_watch import StallWatch
from pdq.runtime.background import Background
from pdq.runtime.signals import Drain
from prefill_worker.cancelled import CancelMemory
from prefill_worker.ends import JobEnds
from prefill_worker.handover import Handover
from prefill_worker.held import GiveBack, HeldJob, HeldJobs, JobOutcome, Phase
from prefill_worker.job import JobRunner
from prefill_worker.leases import LeaseKeeper
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.prefill_times import PrefillTimes
from prefill_worker.settings import PrefillWorkerSettings
from prefill_worker.taker import Taker

log = structlog.get_logger(__name__)


class PrefillWorker:
    def __init__(
        self,
        *,
        worker_id: str,
        endpoint: str,
        model: str,
        settings: PrefillWorkerSettings,
        drain_grace_s: float,
        stall_exit_s: float,
        lease_s: float,
        queue: PrefillQueue,
        engine: Engine,
        engine_info: EngineInfo,
        peers: NoticePeers,
        view: RegistryView,
        metrics: PrefillMetrics,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._model = model
        self._queue = queue
        self._engine = engine
        self._info = engine_info
        self._metrics = metrics
        self._clock = clock
        self._held = HeldJobs()
        self._cancels = CancelMemory()
        self._ledger = KvLedger(total_blocks=engine_info.total_blocks, block_size=engine_info.block_size)
        self._progress = Progress(clock(), stall_s=settings.prefill_stall_s)
        self._times = PrefillTimes()
        self._stats: EngineStats | None = None
        self._is_draining = False
        self._background = Background()
        self._drain_grace_s = drain_grace_s
        self._stepped = asyncio.Event()
        self._handover = Handover(
            fingerprint=engine_info.fingerprint,
            peers=peers,
            view=view,
            settings=settings,
            clock=clock,
            rng=rng,
            on_answer=metrics.on_answer,
        )
        self._ends = JobEnds(worker_id=worker_id, queue=queue, engine=engine, peers=peers, metrics=metrics)
        self._runner = JobRunner(
            worker_id=worker_id,
            endpoint=endpoint,
            kv_source=engine_info.kv_source,
            ends=self._ends,
            engine=engine,
            peers=peers,
            handover=self._handover,
            metrics=metrics,
            clock=clock,
        )
        self._taker = Taker(
            worker_id=worker_id,
            queue=queue,
            held_jobs=self._held,
            ledger=self._ledger,
            settings=settings,
            is_stalled=lambda: self._progress.is_stalled(clock()),
            prefill_time=lambda: self._times.formula,
            on_lease=self._on_lease,
            on_dead=self._on_dead,
        )
        self._leases = LeaseKeeper(
            queue=queue,
            held_jobs=self._held,
            progress=self._progress,
            lease_s=lease_s,
            metrics=metrics,
            on_dead=self._on_dead,
            clock=clock,
            rng=rng,
        )
        self._stall_watch = StallWatch(
            self._progress, exit_s=stall_exit_s, clock=clock, on_stall=self._leases.renew_soon
        )
        metrics.watch(self.record, lambda: self._stats)

    async def run(self, drain: Drain, membership: Membership) -> None:
        """Serves until the drain; then finishes what is held, within the grace.

        Raises an ExceptionGroup with EngineError when the engine is gone, or stands still for good; its jobs are given
        back as failures then.
        """
        failure: str | None = "engine_gone: the prefill engine has ended, or hangs"
        try:
            async with asyncio.TaskGroup() as background:
                tasks = [
                    background.create_task(self._feed()),
                    background.create_task(membership.run()),
                    background.create_task(self._leases.run_renewals()),
                    background.create_task(self._leases.run_reaping()),
                    background.create_task(self._stall_watch.run()),
                ]
                taking = background.create_task(self._taker.run())
                await drain.wait()
                self._is_draining = True
                self._taker.stop()
                await taking
                await self._finish_held()
                failure = None
                for task in tasks:
                    task.cancel()
        finally:
            await asyncio.shield(self._give_back_held(failure))
            await self._leave_queue()
            await membership.leave()

    def on_notice(self, message: Notice, reply: NoticeReply) -> None:
        """The inbox's handler: gateways cancel, decode workers tell of room."""
        match message:
            case Cancel():
                self._cancels.remember(message.request_id, message.pair, self._clock())
                for held in self._held.of_request(message.request_id):
                    if held.lease.pair <= message.pair and held.task is not None and held.end is None:
                        log.info("cancelled", request_id=message.request_id, reason=message.reason)
                        held.task.cancel()
                self._background.spawn(self._ends.release_unread(message.request_id, message.pair))
                reply(Cancelled(request_id=message.request_id, pair=message.pair))
            case Room():
                self._handover.on_room()
            case _:
                log.warning("unexpected_notice", kind=type(message).__name__)

    def record(self) -> WorkerRecord:
        stats = self._stats
        return WorkerRecord(
            worker_id=self._worker_id,
            role="prefill",
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
            parked=self._held.num_parked,
            prefill_time=str(self._times.formula or ""),
            done_tokens=self._metrics.num_tokens,
        )

    def _state(self) -> str:
        if self._is_draining:
            return "draining"
        return "stalled" if self._progress.is_stalled(self._clock()) else "ready"

    def _on_lease(self, lease: JobLease) -> None:
        if self._cancels.covers(lease.job.request_id, lease.pair, self._clock()):
            log.info("cancelled", request_id=lease.job.request_id, reason="before its take was answered")
            return  # the queue has it no more
        held = HeldJob(lease=lease, taken_at=self._clock())
        if self._ledger.holds(held.engine_request_id):
            self._background.spawn(self._give_back_known(lease))
            return
        self._metrics.on_take(held)
        if self._ledger.could_ever_promise(held.num_tokens):
            self._ledger.promise(held.engine_request_id, held.num_tokens)
            coroutine = self._runner.run(held)
        else:
            coroutine = self._refuse(held)
        held.task = self._background.spawn(coroutine, name=held.engine_request_id)
        self._held.add(held)
        held.task.add_done_callback(lambda task: self._on_job_end(held))

    async def _give_back_known(self, lease: JobLease) -> None:
        """The queue has lost a take (Redis came back older than it was) and named this pair a second time."""
        log.warning("pair_taken_twice", request_id=lease.job.request_id, pair=str(lease.pair))
        with contextlib.suppress(QueueUnavailable):  # then the lease expires
            await self._queue.give_back(lease, failure=None)

    def _on_dead(self, dead: DeadJob) -> None:
        """Told beside the work: a gateway that is gone itself answers nothing, and would hold up takes and renewals."""
        self._background.spawn(self._ends.tell_dead(dead))

    async def _refuse(self, held: HeldJob) -> None:
        """A prompt larger than the whole pool: an answer now beats a queue that stands still."""
        held.outcome = JobOutcome.REFUSED
        pool_tokens = self._info.total_blocks * self._info.block_size
        detail = f"the prompt has {held.num_tokens} tokens, the prefill worker's KV pool holds {pool_tokens}"
        await self._ends.refuse(held, state="refused", code="prompt_too_long", detail=detail)

    def _on_job_end(self, held: HeldJob) -> None:
        self._held.remove(held)
        if not held.was_submitted:
            self._ledger.release(held.engine_request_id)  # the engine knows nothing of it, and won't say
        self._metrics.on_end(held)
        self._taker.room_changed()

    async def _feed(self) -> None:
        """Engine steps to jobs and ledger."""
        async for step in self._engine.outputs():
            self._observe(step)
            for output in step.outputs:
                self._on_output(output)
            released = [self._ledger.release(engine_request_id) for engine_request_id in step.released]
            for engine_request_id in step.released:
                if (held := self._held.get(engine_request_id)) is not None:
                    held.is_kv_gone = True
            if any(released):
                self._taker.room_changed()
            self._stepped.set()

    def _observe(self, step: StepOutputs) -> None:
        self._stats = step.stats
        is_idle = step.stats.running == 0 and step.stats.waiting == 0
        now = self._clock()
        was_stalled = self._progress.is_stalled(now)
        self._progress.observe(step.stats.step, is_idle=is_idle, now=now)
        if was_stalled and not self._progress.is_stalled(now):
            self._taker.room_changed()

    def _on_output(self, output: EngineOutput) -> None:
        held = self._held.get(output.engine_request_id)
        is_end = output.finish is not None or output.error is not None
        if held is not None and is_end and not held.prefilled.done():
            if output.error is None:
                computed = held.num_tokens - output.cached_tokens
                self._times.ended(computed, submitted_at=held.prefill_started_at, now=self._clock())
            held.prefilled.set_result(output)
            self._taker.room_changed()

    async def _finish_held(self) -> None:
        """Waits, within the grace, for the held jobs and then for the readers of their KV."""
        log.info("draining", jobs=len(self._held))
        try:
            async with asyncio.timeout(self._drain_grace_s):
                while len(self._held) or not self._ledger.is_empty:
                    self._stepped.clear()
                    await self._stepped.wait()
        except TimeoutError:
            log.warning("drain_grace_over", jobs=len(self._held))

    async def _leave_queue(self) -> None:
        """The reaper forgets the name otherwise."""
        try:
            await self._queue.leave(self._worker_id)
        except QueueUnavailable as exc:
            log.warning("queue_not_left", error=str(exc))

    async def _give_back_held(self, failure: str | None) -> None:
        """What is still held goes back to its place in the queue; the engine failed those only that it computed."""
        for held in self._held.all():
            held.end = held.end or GiveBack(failure=failure if held.phase is Phase.COMPUTING else None)
            try:
                await self._ends.tell_queue(held)
            except QueueUnavailable as exc:
                log.warning("queue_unavailable_for_job", error=str(exc))
            if held.task is not None:
                held.task.cancel()
        await self._background.settled(timeout_s=5)
