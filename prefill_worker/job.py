"""One job from its lease to its settlement (hops 3 to 5). Each job runs in a task of its own.

Pull: prefill, then offer the finished KV (KvReady). Push: reserve a place at a decode worker first (Reserve), then
prefill while the engine's connector writes the KV over there, then say what it took (KvReady without a ticket).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from broker.errors import PeerUnavailable
from broker.links import NoticePeers
from broker.messages import Gone, KvReady, PromptLogprobs, Reserve
from engine.base import Engine, EngineError, EngineOutput, EngineRequest, PrefillOnly, PushKv
from pdq.wire.types import KvSource, KvTicket
from prefill_worker.ends import JobEnds
from prefill_worker.handover import Handover, HandoverResult, Outcome
from prefill_worker.held import HeldJob, JobOutcome, Phase
from prefill_worker.metrics import PrefillMetrics

log = structlog.get_logger(__name__)


class JobRunner:
    def __init__(
        self,
        *,
        worker_id: str,
        endpoint: str,
        kv_source: KvSource,
        ends: JobEnds,
        engine: Engine,
        peers: NoticePeers,
        handover: Handover,
        metrics: PrefillMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._kv_source = kv_source
        self._ends = ends
        self._engine = engine
        self._peers = peers
        self._handover = handover
        self._metrics = metrics
        self._clock = clock

    async def run(self, held: HeldJob) -> None:
        """Returns when the job is no longer this worker's. Cancelled: the lease was lost; frees the KV only."""
        structlog.contextvars.bind_contextvars(request_id=held.lease.job.request_id, pair=str(held.lease.pair))
        try:
            if held.lease.job.mode == "push":
                await self._push(held)
            else:
                await self._pull(held)
        finally:
            await asyncio.shield(self._drop(held))

    async def _pull(self, held: HeldJob) -> None:
        output = await self._prefill(held, PrefillOnly())
        if output is None:
            return
        if output.ticket is None:
            raise RuntimeError(f"engine finished prefill {held.engine_request_id} without a KV ticket")
        result = await self._handover.offer(held, self._ready(held, output, output.ticket))
        if result.outcome is not Outcome.ACCEPTED:
            await self._not_accepted(held, result)
            return
        held.needs_drop = False  # from here on the reader's lease holds the blocks, whatever the settle says
        await self._settle(held, result.decode_worker)

    async def _push(self, held: HeldJob) -> None:
        result = await self._handover.offer(held, self._reserve(held))
        if result.outcome is not Outcome.ACCEPTED:
            await self._not_accepted(held, result)
            return
        held.phase = Phase.COMPUTING
        output = await self._prefill(held, PushKv())
        if output is None:
            return
        held.phase = Phase.OFFERING
        try:
            answer = await self._peers.request(result.endpoint, self._ready(held, output, None))
        except PeerUnavailable:
            # D holds the request: its connector and the gateway notice if it is dead
            log.warning("decode_worker_silent", worker=result.decode_worker)
        else:
            if isinstance(answer, Gone):
                log.info("request_gone", reason=answer.reason)
                held.outcome = JobOutcome.GONE
                await self._drop(held)
                await self._ends.settle(held, state="gone")
                return
        held.needs_drop = False  # what is not written yet goes on; the engine reports the blocks' release
        await self._settle(held, result.decode_worker)

    async def _prefill(self, held: HeldJob, kv: PrefillOnly | PushKv) -> EngineOutput | None:
        """None: the engine failed, and the job was given back."""
        job = held.lease.job
        held.prefill_started_at = self._clock()
        held.was_submitted = held.needs_drop = True
        request = EngineRequest(
            engine_request_id=held.engine_request_id,
            request_id=job.request_id,
            pair=held.lease.pair,
            prompt_ids=job.prompt_ids,
            generated_ids=job.generated_ids,
            sampling=job.sampling,
            kv=kv,
        )
        try:
            await self._engine.submit(request)
            output = await held.prefilled
        except EngineError as exc:  # it has just died: the worker ends, this job must not wait for its lease to run out
            output = EngineOutput(engine_request_id=held.engine_request_id, error=f"engine_error: {exc}")
        if output.error is not None:
            held.needs_drop = False
            held.outcome = JobOutcome.FAILED
            await self._ends.give_back(held, failure=output.error)
            return None
        prefill_s = held.prefill_s(self._clock())
        self._metrics.on_prefilled(held, prefill_s=prefill_s, cached_tokens=output.cached_tokens)
        if output.prompt_logprobs is not None:
            await self._ends.notify(
                job.gateway,
                PromptLogprobs(request_id=job.request_id, pair=held.lease.pair, positions=output.prompt_logprobs),
            )
        return output

    async def _settle(self, held: HeldJob, decode_worker: str) -> None:
        held.outcome = JobOutcome.HANDED_OVER
        await self._ends.settle(held, state="decoding", decode_worker=decode_worker)
        log.info("handed_over", decode_worker=decode_worker, prefill_s=round(held.prefill_s(self._clock()), 6))

    async def _drop(self, held: HeldJob) -> None:
        """Before the queue is told: that may take long."""
        if held.needs_drop:
            held.needs_drop = False
            await self._ends.drop(held)

    async def _not_accepted(self, held: HeldJob, result: HandoverResult) -> None:
        await self._drop(held)
        if result.outcome is Outcome.GONE:
            log.info("request_gone", reason=result.reason)
            held.outcome = JobOutcome.GONE
            await self._ends.settle(held, state="gone")
        elif result.outcome is Outcome.EXPIRED:
            await self._expire(held)
        elif result.outcome is Outcome.KV_GONE:
            log.info("given_back", reason="a decode worker read the KV and did not take the request")
            held.outcome = JobOutcome.KV_GONE
            await self._ends.give_back(held, failure=None)
        else:
            log.info("given_back", reason="no decode worker had room")
            held.outcome = JobOutcome.NO_ROOM
            await self._ends.give_back(held, failure=None)

    async def _expire(self, held: HeldJob) -> None:
        """The gateway keeps the time itself and has answered; it is told all the same, as of what the queue ends."""
        log.info("deadline_passed")
        held.outcome = JobOutcome.EXPIRED
        detail = "deadline passed while no decode worker had room"
        await self._ends.refuse(held, state="deadline", code="deadline_exceeded", detail=detail)

    def _reserve(self, held: HeldJob) -> Reserve:
        lease, job = held.lease, held.lease.job
        return Reserve(
            request_id=job.request_id,
            pair=lease.pair,
            remaining_s=held.remaining_s(self._clock()),
            prompt_ids=job.prompt_ids,
            generated_ids=job.generated_ids,
            sampling=job.sampling,
            source=self._kv_source,
            gateway=job.gateway,
            gateway_id=job.gateway_id,
            prefill_worker=self._worker_id,
            prefill_endpoint=self._endpoint,
            queue_wait_s=lease.queue_wait_s,
        )

    def _ready(self, held: HeldJob, output: EngineOutput, ticket: KvTicket | None) -> KvReady:
        lease, job = held.lease, held.lease.job
        return KvReady(
            request_id=job.request_id,
            pair=lease.pair,
            remaining_s=held.remaining_s(self._clock()),
            prompt_ids=job.prompt_ids if ticket else b"",  # in push D has them from Reserve
            generated_ids=job.generated_ids if ticket else b"",
            sampling=job.sampling,
            ticket=ticket,
            gateway=job.gateway,
            gateway_id=job.gateway_id,
            prefill_worker=self._worker_id,
            prefill_endpoint=self._endpoint,
            queue_wait_s=lease.queue_wait_s,
            prefill_s=held.prefill_s(self._clock()),
            cached_tokens=output.cached_tokens,
        )
