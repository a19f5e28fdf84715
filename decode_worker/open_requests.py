"""The open requests with what hangs on each: table entry, engine request, promised room. All ends are here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Final

import structlog

from broker.errors import PeerUnavailable
from broker.links import NoticePeers
from broker.messages import Failed
from decode_worker.metrics import DecodeMetrics
from decode_worker.requests import DecodeRequest, RequestTable
from engine.base import FINAL_ERRORS, Engine, EngineError
from pdq.runtime.background import Background

_CANCEL_S: Final = 1.0
"""After a deadline: by then the gateway has answered, and its Cancel is here."""
log = structlog.get_logger(__name__)


class OpenRequests:
    def __init__(
        self,
        *,
        worker_id: str,
        table: RequestTable,
        engine: Engine,
        peers: NoticePeers,
        metrics: DecodeMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._peers = peers
        self._metrics = metrics
        self._clock = clock
        self._background = Background()
        self.table = table

    def finish(self, request: DecodeRequest) -> None:
        """Its last delta is on the link."""
        self._metrics.on_end("finished")
        self.table.close(request, self._clock())

    def fail(self, request: DecodeRequest, error: str) -> None:
        """The engine gave it up; the gateway decides whether it goes on elsewhere. `error` is `code: detail`."""
        log.warning("decode_failed", request_id=request.offer.request_id, pair=str(request.offer.pair), error=error)
        code, _, detail = error.partition(": ")
        self._metrics.on_end("failed")
        self._metrics.on_failure(code, detail)
        self.table.close(request, self._clock(), gone=error)
        self.spawn(self._send_failed(request, code=code, detail=detail, retryable=code not in FINAL_ERRORS))

    def abort(self, request: DecodeRequest, *, reason: str | None) -> None:
        """With a reason, a repeated KvReady of this pair is answered Gone; without, it may start anew."""
        self._metrics.on_end("not_admitted" if reason is None else "cancelled")
        self.table.close(request, self._clock(), gone=reason)
        self.spawn(self._abort_in_engine(request.engine_request_id))

    def expire(self) -> None:
        """Ends those whose deadline has passed. Gateways cancel in time; this is for a Cancel that never comes."""
        for request in self.table.expired(self._clock() - _CANCEL_S):
            log.info("deadline_passed", request_id=request.offer.request_id, pair=str(request.offer.pair))
            self.abort(request, reason="deadline passed")
            detail = f"deadline passed in the decode worker; {request.next_seq} tokens were generated"
            self.spawn(self._send_failed(request, code="deadline_exceeded", detail=detail, retryable=False))

    def fail_stalled(self) -> None:
        """The engine hangs with all that it has. Should it move again, it finds that nobody wants that any more."""
        for request in self.table.all():
            self.fail(request, "engine_stalled: the decode engine makes no progress")
            self.spawn(self._abort_in_engine(request.engine_request_id))

    async def fail_all(self, detail: str) -> None:
        """This worker ends: every open request is continued elsewhere."""
        requests = self.table.all()
        for request in requests:
            self._metrics.on_end("stopped")
            self.table.close(request, self._clock(), gone=detail)
        await asyncio.gather(
            *(self._send_failed(request, code="worker_stopped", detail=detail) for request in requests)
        )

    def spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        """Runs to its end beside the loops; a crash is logged."""
        self._background.spawn(coroutine)

    async def _send_failed(self, request: DecodeRequest, *, code: str, detail: str, retryable: bool = True) -> None:
        offer = request.offer
        failed = Failed(
            request_id=offer.request_id,
            pair=offer.pair,
            worker=self._worker_id,
            code=code,
            detail=detail,
            retryable=retryable,
        )
        try:
            await self._peers.request(offer.gateway, failed)
        except PeerUnavailable:
            log.warning("gateway_silent", request_id=offer.request_id, gateway=offer.gateway)

    async def _abort_in_engine(self, engine_request_id: str) -> None:
        with contextlib.suppress(EngineError):  # its KV went with the engine
            await self._engine.abort(engine_request_id)
