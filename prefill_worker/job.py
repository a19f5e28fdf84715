"""One job from its lease to its settlement (hops 3 to 5). Each job runs in a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from broker.base import DeadJob, PrefillQueue
from broker.errors import PeerUnavailable, QueueUnavailable
from broker.links import NoticePeers
from broker.messages import Failed, KvReady, PromptLogprobs
from engine.base import Engine, EngineError, EngineOutput, EngineRequest, PrefillOnly
from pdq.wire.types import Pair
from prefill_worker.handover import Handover, Outcome
from prefill_worker.held import HeldJob, JobOutcome
from prefill_worker.metrics import PrefillMetrics

log = structlog.get_logger(__name__)


class JobRunner:
    def __init__(
        self,
        *,
        worker_id: str,
        endpoint: str,
        queue: PrefillQueue,
        engine: Engine,
        peers: NoticePeers,
        handover: Handover,
        metrics: PrefillMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._queue = queue
        self._engine = engine
        self._peers = peers
        self._handover = handover
        self._metrics = metrics
        self._clock = clock

    async def run(self, held: HeldJob) -> None:
        """Returns when the job is no longer this worker's. Cancelled: the lease was lost; frees the KV only."""
        structlog.contextvars.bind_contextvars(request_id=held.lease.job.request_id, pair=str(held.lease.pair))
        try:
            started_at = self._clock()
            output = await self._prefill(held)
            if output.error is None:
                prefill_s = self._clock() - started_at
                self._metrics.on_prefilled(held, prefill_s=prefill_s, cached_tokens=output.cached_tokens)
                await self._hand_over(held, output, prefill_s=prefill_s)
            else:
                held.needs_drop = False
                held.outcome = JobOutcome.FAILED
                await self._give_back(held, failure=output.error)
        except QueueUnavailable as exc:
            # settle or give back did not reach Redis: the lease runs out and the job is reaped; fences hold
            log.warning("queue_unavailable_for_job", error=str(exc))
        finally:
            if held.needs_drop:
                await asyncio.shield(self._drop(held))

    async def _prefill(self, held: HeldJob) -> EngineOutput:
        job = held.lease.job
        request = EngineRequest(
            engine_request_id=held.engine_request_id,
            request_id=job.request_id,
            pair=held.lease.pair,
            prompt_ids=job.prompt_ids,
            generated_ids=job.generated_ids,
            sampling=job.sampling,
            kv=PrefillOnly(),
        )
        try:
            await self._engine.submit(request)
        except EngineError as exc:  # it has just died: the worker ends, this job must not wait for its lease to run out
            return EngineOutput(engine_request_id=held.engine_request_id, error=f"engine_error: {exc}")
        return await held.prefilled

    async def _hand_over(self, held: HeldJob, output: EngineOutput, *, prefill_s: float) -> None:
        lease, job = held.lease, held.lease.job
        if output.ticket is None:
            raise RuntimeError(f"engine finished prefill {held.engine_request_id} without a KV ticket")
        if output.prompt_logprobs is not None:
            await self._send_prompt_logprobs(held, output)
        ready = KvReady(
            request_id=job.request_id,
            pair=lease.pair,
            remaining_s=held.remaining_s(self._clock()),
            prompt_ids=job.prompt_ids,
            generated_ids=job.generated_ids,
            sampling=job.sampling,
            ticket=output.ticket,
            gateway=job.gateway,
            gateway_id=job.gateway_id,
            prefill_worker=self._worker_id,
            prefill_endpoint=self._endpoint,
            queue_wait_s=lease.queue_wait_s,
            prefill_s=prefill_s,
            cached_tokens=output.cached_tokens,
        )
        result = await self._handover.offer(held, ready)
        match result.outcome:
            case Outcome.ACCEPTED:
                held.outcome = JobOutcome.HANDED_OVER
                held.needs_drop = False  # from here on the reader's lease holds the blocks, whatever the settle says
                await self._queue.settle(lease, state="decoding", decode_worker=result.decode_worker)
                log.info("handed_over", decode_worker=result.decode_worker, prefill_s=round(prefill_s, 6))
            case Outcome.GONE:
                held.outcome = JobOutcome.GONE
                await self._queue.settle(lease, state="gone")
                log.info("request_gone", reason=result.reason)
            case Outcome.NO_ROOM:
                held.outcome = JobOutcome.NO_ROOM
                log.info("given_back", reason="no decode worker had room")
                await self._give_back(held, failure=None)
            case Outcome.KV_GONE:
                held.outcome = JobOutcome.KV_GONE
                log.info("given_back", reason="a decode worker read the KV and did not take the request")
                await self._give_back(held, failure=None)

    async def _give_back(self, held: HeldJob, *, failure: str | None) -> None:
        if failure is not None:
            log.warning("prefill_failed", error=failure)
        dead = await self._queue.give_back(held.lease, failure=failure)
        if dead is not None:
            await self.tell_dead(dead)

    async def tell_dead(self, dead: DeadJob) -> None:
        """The queue has ended this job: its gateway must answer the client."""
        await self.notify(
            dead.gateway,
            Failed(
                request_id=dead.request_id,
                pair=dead.pair,
                worker=self._worker_id,
                code=dead.reason,
                detail=dead.detail,
                retryable=False,
            ),
        )

    async def _send_prompt_logprobs(self, held: HeldJob, output: EngineOutput) -> None:
        await self.notify(
            held.lease.job.gateway,
            PromptLogprobs(
                request_id=held.lease.job.request_id, pair=held.lease.pair, positions=output.prompt_logprobs or ()
            ),
        )

    async def notify(self, gateway: str, message: Failed | PromptLogprobs) -> None:
        try:
            await self._peers.request(gateway, message)
        except PeerUnavailable:
            log.warning("gateway_silent", gateway=gateway, kind=type(message).__name__, request_id=message.request_id)

    async def release_unread(self, request_id: str, pair: Pair) -> None:
        """Of a job that was handed over: its reader died, or will not come. Nothing happens to any other."""
        with contextlib.suppress(EngineError):
            await self._engine.release(f"{request_id}:{pair.gen}:{pair.attempt}")

    async def _drop(self, held: HeldJob) -> None:
        """Whatever state the engine has it in: nobody will come for this prefill."""
        with contextlib.suppress(EngineError):  # its KV went with the engine
            if held.prefilled.done() and not held.prefilled.cancelled():
                await self._engine.release(held.engine_request_id)
            else:
                await self._engine.abort(held.engine_request_id)
