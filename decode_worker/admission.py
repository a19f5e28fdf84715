"""Hop 6: which prefills this worker takes. Room first, then the gateway's word."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from broker.errors import PeerUnavailable
from broker.links import NoticePeers, NoticeReply
from broker.messages import Accepted, Admit, Busy, Cancel, Delta, Go, Gone, KvReady, Notice, Reserve, Start
from decode_worker.open_requests import OpenRequests
from decode_worker.requests import DecodeRequest, Offer, Verdict
from decode_worker.room import RoomWaiters
from decode_worker.settings import DecodeWorkerSettings
from engine.base import Engine, EngineError, EngineRequest, LoadKv, ReceiveKv
from engine.ledger import KvLedger
from pdq.wire.types import KvTicket, num_ids

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
        next_frame: Callable[[str], int],
        clock: Callable[[], float],
    ) -> None:
        """`on_go` sends the deltas that were held back until Go. `is_stalled`: the engine hangs.

        `next_frame(gateway)`: number of the next frame of deltas to it.
        """
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
        self._next_frame = next_frame
        self._clock = clock
        self._replies: dict[DecodeRequest, NoticeReply] = {}
        self.is_open = True

    def on_offer(self, offer: Offer, reply: NoticeReply) -> None:
        """Answers now, or once the gateway has spoken."""
        if isinstance(offer, KvReady) and offer.ticket is None:
            self._on_prefilled(offer, reply)
            return
        verdict, answer = self._table.classify(offer, self._clock())
        request = self._table.by_request_id(offer.request_id)
        if answer is not None:
            reply(self._accepted(offer) if isinstance(answer, Accepted) else answer)
        elif verdict is Verdict.ADMITTING and request is not None:
            self._replies[request] = reply
        elif offer.remaining_s <= 0:
            reply(Gone(request_id=offer.request_id, pair=offer.pair, reason="deadline passed"))
        elif self._has_room(offer):
            self._start(offer, reply)
        else:
            reply(Busy(request_id=offer.request_id, pair=offer.pair, free_tokens=self._ledger.free_tokens))
            if not isinstance(offer, Start):
                self._room.add(offer.prefill_endpoint)

    def _on_prefilled(self, ready: KvReady, reply: NoticeReply) -> None:
        """Push: P has computed what it reserved room for. Its KV may be here already, or still on its way."""
        _, answer = self._table.classify(ready, self._clock())
        request = self._table.by_request_id(ready.request_id)
        if request is not None and request.offer.pair == ready.pair:
            request.prefilled = ready
            reply(Accepted(request_id=ready.request_id, pair=ready.pair))
        else:
            reply(answer or Gone(request_id=ready.request_id, pair=ready.pair, reason="nothing was reserved here"))

    def on_cancel(self, cancel: Cancel) -> None:
        """Also right before the request's KvReady has come."""
        self._table.bar(cancel.request_id, cancel.pair, self._clock(), cancel.reason)
        request = self._table.by_request_id(cancel.request_id)
        if request is not None and request.offer.pair <= cancel.pair:
            log.info("cancelled", request_id=cancel.request_id, reason=cancel.reason)
            self._requests.abort(request, reason=cancel.reason)

    def _has_room(self, offer: Offer) -> bool:
        if not self.is_open or self._is_stalled() or self._ledger.holds(_engine_request_id(offer)):
            return False  # the latter: an aborted one of the same pair still drains
        return self._ledger.can_promise(self._needed_tokens(offer))

    def _needed_tokens(self, offer: Offer) -> int:
        """Prompt and expected output, but never more than the pool: a request that fills it may run alone."""
        generated = num_ids(offer.generated_ids)
        expected = min(max(offer.sampling.max_tokens - generated, 1), self._settings.expected_output_tokens)
        return min(num_ids(offer.prompt_ids) + generated + expected, self._ledger.total_tokens)

    def _start(self, offer: Offer, reply: NoticeReply) -> None:
        request, replaced = self._table.open(offer, self._clock())
        if replaced is not None:
            self._requests.abort(replaced, reason=None)
        self._ledger.promise(request.engine_request_id, self._needed_tokens(offer))
        self._replies[request] = reply
        self._requests.spawn(self._admit(request))

    async def _admit(self, request: DecodeRequest) -> None:
        """Asks the gateway while the engine reads the KV already: one round trip less before the first token."""
        offer = request.offer
        engine_request = EngineRequest(
            engine_request_id=request.engine_request_id,
            request_id=offer.request_id,
            pair=offer.pair,
            prompt_ids=offer.prompt_ids,
            generated_ids=offer.generated_ids,
            sampling=offer.sampling,
            kv=_kv_of(offer),
        )
        try:
            await self._engine.submit(engine_request)
        except EngineError:  # it has just died and this worker ends: P has the KV still and asks another one
            self._requests.abort(request, reason=None)
            self._answer(request, Busy(request_id=offer.request_id, pair=offer.pair, free_tokens=0))
            return
        self._answer(request, self._decide(request, await self._ask_gateway(offer)))

    def _answer(self, request: DecodeRequest, message: Notice) -> None:
        reply = self._replies.pop(request, None)
        if reply is not None:
            reply(message)

    async def _ask_gateway(self, offer: Offer) -> Notice | None:
        """None: no answer."""
        try:
            return await self._peers.request(offer.gateway, self._question(offer), tries=self._settings.admit_tries)
        except PeerUnavailable:
            return None

    def _decide(self, request: DecodeRequest, answer: Notice | None) -> Notice:
        offer = request.offer
        if not self._table.is_open(request):
            return Gone(request_id=offer.request_id, pair=offer.pair, reason="cancelled or failed before Go")
        if isinstance(answer, Go):
            self._on_go(request, self._table.go(request, self._clock()))
            return self._accepted(offer)
        if isinstance(answer, Gone):
            self._requests.abort(request, reason=answer.reason)
            return answer
        # Not Gone: the gateway may only be slow, and P would settle a job that nobody has answered.
        log.warning("gateway_silent", request_id=offer.request_id, gateway=offer.gateway)
        self._requests.abort(request, reason=None)
        return Busy(request_id=offer.request_id, pair=offer.pair, free_tokens=0)

    def _accepted(self, offer: Offer) -> Accepted:
        return Accepted(request_id=offer.request_id, pair=offer.pair, clock_ms=int(self._clock() * 1000))

    def _question(self, offer: Offer) -> Admit:
        return Admit(
            request_id=offer.request_id,
            pair=offer.pair,
            worker=self._worker_id,
            endpoint=self._endpoint,
            prefill_worker="" if isinstance(offer, Start) else offer.prefill_worker,
            queue_wait_s=0.0 if isinstance(offer, Start) else offer.queue_wait_s,
            prefill_s=offer.prefill_s if isinstance(offer, KvReady) else 0.0,
            cached_tokens=offer.cached_tokens if isinstance(offer, KvReady) else 0,
            frame=self._next_frame(offer.gateway),
        )


def _engine_request_id(offer: Offer) -> str:
    return f"{offer.request_id}:{offer.pair.gen}:{offer.pair.attempt}"


def _kv_of(offer: Offer) -> LoadKv | ReceiveKv | None:
    """Where the prompt's KV comes from: read from P, written by P, or computed here."""
    match offer:
        case KvReady(ticket=KvTicket() as ticket):
            return LoadKv(ticket=ticket)
        case Reserve(source=source):
            return ReceiveKv(source=source)
        case _:
            return None
