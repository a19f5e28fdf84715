"""Hop 6: which prefills this worker takes. Room first, then the gateway's word."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from broker.errors import PeerUnavailable
from broker.links import NoticePeers, NoticeReply
from broker.messages import Accepted, Admit, Busy, Cancel, Delta, Go, Gone, KvReady, Notice
from decode_worker.open_requests import OpenRequests
from decode_worker.requests import DecodeRequest, Verdict
from decode_worker.room import RoomWaiters
from decode_worker.settings import DecodeWorkerSettings
from engine.base import Engine, EngineError, EngineRequest, LoadKv
from engine.ledger import KvLedger
from pdq.wire.types import num_ids

log = structlog.get_logger(__name__)


class Admission:
    def __init__(
        self,
        *,
        worker_id: str,
        endpoint: str,
        settings: DecodeWorkerSettings,
        requests: OpenRequests,
        ledger: KvLedger,
        room: RoomWaiters,
        engine: Engine,
        peers: NoticePeers,
        is_stalled: Callable[[], bool],
        on_go: Callable[[DecodeRequest, list[Delta]], None],
        clock: Callable[[], float],
    ) -> None:
        """`on_go` sends the deltas that were held back until Go. `is_stalled`: the engine hangs."""
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._settings = settings
        self._requests = requests
        self._table = requests.table
        self._ledger = ledger
        self._room = room
        self._engine = engine
        self._peers = peers
        self._is_stalled = is_stalled
        self._on_go = on_go
        self._clock = clock
        self._replies: dict[DecodeRequest, NoticeReply] = {}
        self.is_open = True

    def on_kv_ready(self, ready: KvReady, reply: NoticeReply) -> None:
        """Answers now, or once the gateway has spoken."""
        verdict, answer = self._table.classify(ready, self._clock())
        request = self._table.by_request_id(ready.request_id)
        if answer is not None:
            reply(answer)
        elif verdict is Verdict.ADMITTING and request is not None:
            self._replies[request] = reply
        elif self._has_room(ready):
            self._start(ready, reply)
        else:
            reply(Busy(request_id=ready.request_id, pair=ready.pair, free_tokens=self._ledger.free_tokens))
            self._room.add(ready.prefill_endpoint)

    def on_cancel(self, cancel: Cancel) -> None:
        """Also right before the request's KvReady has come."""
        self._table.bar(cancel.request_id, cancel.pair, self._clock(), cancel.reason)
        request = self._table.by_request_id(cancel.request_id)
        if request is not None and request.ready.pair <= cancel.pair:
            log.info("cancelled", request_id=cancel.request_id, reason=cancel.reason)
            self._requests.abort(request, reason=cancel.reason)

    def _has_room(self, ready: KvReady) -> bool:
        if not self.is_open or self._is_stalled() or self._ledger.holds(_engine_request_id(ready)):
            return False  # the latter: an aborted one of the same pair still drains
        return self._ledger.can_promise(self._needed_tokens(ready))

    def _needed_tokens(self, ready: KvReady) -> int:
        """Prompt and expected output, but never more than the pool: a request that fills it may run alone."""
        generated = num_ids(ready.generated_ids)
        expected = min(max(ready.sampling.max_tokens - generated, 1), self._settings.expected_output_tokens)
        return min(num_ids(ready.prompt_ids) + generated + expected, self._ledger.total_tokens)

    def _start(self, ready: KvReady, reply: NoticeReply) -> None:
        request, replaced = self._table.open(ready)
        if replaced is not None:
            self._requests.abort(replaced, reason=None)
        self._ledger.promise(request.engine_request_id, self._needed_tokens(ready))
        self._replies[request] = reply
        self._requests.spawn(self._admit(request))

    async def _admit(self, request: DecodeRequest) -> None:
        """Asks the gateway while the engine reads the KV already: one round trip less before the first token."""
        ready = request.ready
        engine_request = EngineRequest(
            engine_request_id=request.engine_request_id,
            request_id=ready.request_id,
            pair=ready.pair,
            prompt_ids=ready.prompt_ids,
            generated_ids=ready.generated_ids,
            sampling=ready.sampling,
            kv=LoadKv(ticket=ready.ticket),
        )
        try:
            await self._engine.submit(engine_request)
        except EngineError:  # it has just died and this worker ends: P has the KV still and asks another one
            self._requests.abort(request, reason=None)
            self._answer(request, Busy(request_id=ready.request_id, pair=ready.pair, free_tokens=0))
            return
        try:
            answer: Notice | None = await self._peers.request(
                ready.gateway, self._question(ready), tries=self._settings.admit_tries
            )
        except PeerUnavailable:
            answer = None
        self._answer(request, self._decide(request, answer))

    def _answer(self, request: DecodeRequest, message: Notice) -> None:
        reply = self._replies.pop(request, None)
        if reply is not None:
            reply(message)

    def _decide(self, request: DecodeRequest, answer: Notice | None) -> Notice:
        ready = request.ready
        if not self._table.is_open(request):
            return Gone(request_id=ready.request_id, pair=ready.pair, reason="cancelled or failed before Go")
        if isinstance(answer, Go):
            self._on_go(request, self._table.go(request, self._clock()))
            return Accepted(request_id=ready.request_id, pair=ready.pair)
        if isinstance(answer, Gone):
            self._requests.abort(request, reason=answer.reason)
            return answer
        # Not Gone: the gateway may only be slow, and P would settle a job that nobody has answered.
        log.warning("gateway_silent", request_id=ready.request_id, gateway=ready.gateway)
        self._requests.abort(request, reason=None)
        return Busy(request_id=ready.request_id, pair=ready.pair, free_tokens=0)

    def _question(self, ready: KvReady) -> Admit:
        return Admit(
            request_id=ready.request_id,
            pair=ready.pair,
            worker=self._worker_id,
            endpoint=self._endpoint,
            prefill_worker=ready.prefill_worker,
            queue_wait_s=ready.queue_wait_s,
            prefill_s=ready.prefill_s,
            cached_tokens=ready.cached_tokens,
        )


def _engine_request_id(ready: KvReady) -> str:
    return f"{ready.request_id}:{ready.pair.gen}:{ready.pair.attempt}"
