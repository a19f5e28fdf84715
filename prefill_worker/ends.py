"""How a job ends on this worker: settled, given back, dropped in the engine; and who must be told."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import structlog

from broker.base import DeadJob, PrefillQueue
from broker.errors import PeerUnavailable, QueueUnavailable
from broker.links import NoticePeers
from broker.messages import Failed, PromptLogprobs
from engine.base import Engine, EngineError
from pdq.wire.types import Pair
from prefill_worker.held import GiveBack, HeldJob, Settle
from prefill_worker.metrics import PrefillMetrics

_RETRY_S: Final = 0.25

log = structlog.get_logger(__name__)


class JobEnds:
    def __init__(
        self, *, worker_id: str, queue: PrefillQueue, engine: Engine, peers: NoticePeers, metrics: PrefillMetrics
    ) -> None:
        self._worker_id = worker_id
        self._queue = queue
        self._engine = engine
        self._peers = peers
        self._metrics = metrics

    async def settle(self, held: HeldJob, *, state: str, decode_worker: str = "") -> None:
        """Returns once the queue knows. Until then the lease is renewed like any other; a lost one cancels the task."""
        held.end = Settle(state=state, decode_worker=decode_worker)
        await self._until_told(held)

    async def refuse(self, held: HeldJob, *, state: str, code: str, detail: str) -> None:
        """Settled without an answer: nobody will compute it, and its gateway, told first, must answer the client."""
        await self.notify(
            held.lease.job.gateway,
            Failed(
                request_id=held.lease.job.request_id,
                pair=held.lease.pair,
                worker=self._worker_id,
                code=code,
                detail=detail,
                retryable=False,
            ),
        )
        await self.settle(held, state=state)

    async def give_back(self, held: HeldJob, *, failure: str | None) -> None:
        """To its old place in the queue; a failure counts, and too many end the job. Returns as `settle` does."""
        if failure is not None:
            log.warning("prefill_failed", error=failure)
            self._metrics.on_failure(failure)
        held.end = GiveBack(failure=failure)
        await self._until_told(held)

    async def tell_queue(self, held: HeldJob) -> None:
        """Its end, once; nothing happens when it is not ours any more. Raises QueueUnavailable: it may have run."""
        match held.end:
            case Settle(state=state, decode_worker=decode_worker):
                if not await self._queue.settle(held.lease, state=state, decode_worker=decode_worker):
                    self._metrics.on_fenced("settle")
            case GiveBack(failure=failure):
                dead = await self._queue.give_back(held.lease, failure=failure)
                if dead is not None:
                    await self.tell_dead(dead)

    async def _until_told(self, held: HeldJob) -> None:
        is_logged = False
        while True:
            try:
                return await self.tell_queue(held)
            except QueueUnavailable as exc:
                if not is_logged:
                    log.warning("queue_unavailable_for_job", error=str(exc))
                is_logged = True
            await asyncio.sleep(_RETRY_S)

    async def drop(self, held: HeldJob) -> None:
        """Whatever state the engine has it in: nobody will come for this prefill."""
        with contextlib.suppress(EngineError):  # its KV went with the engine
            if held.is_prefilled:
                await self._engine.release(held.engine_request_id)
            else:
                await self._engine.abort(held.engine_request_id)

    async def release_unread(self, request_id: str, pair: Pair) -> None:
        """Of a job that was handed over: its reader died, or will not come. Nothing happens to any other."""
        with contextlib.suppress(EngineError):
            await self._engine.release(f"{request_id}:{pair.gen}:{pair.attempt}")

    async def tell_dead(self, dead: DeadJob) -> None:
        """The queue has ended this job: its gateway must answer the client."""
        self._metrics.on_dead(dead.reason)
        await self.notify(
            dead.gateway,
            Failed(
                request_id=dead.request_id,
                pair=dead.pair,
                worker=self._worker_id,
                code=dead.code,
                detail=dead.detail,
                retryable=dead.is_retryable,
            ),
        )

    async def notify(self, gateway: str, message: Failed | PromptLogprobs) -> None:
        try:
            await self._peers.request(gateway, message)
        except PeerUnavailable:
            log.warning("gateway_silent", gateway=gateway, kind=type(message).__name__, request_id=message.request_id)
