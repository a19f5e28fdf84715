"""Hop 5: offering a finished prefill to decode workers until one takes it. One call per job."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import structlog

from broker import placement
from broker.base import WorkerRecord
from broker.errors import PeerUnavailable
from broker.fit import can_exchange
from broker.links import NoticePeers
from broker.membership import RegistryView
from broker.messages import Accepted, Busy, Gone, KvReady, Reserve
from broker.promises import Promises
from broker.silence import Silence
from prefill_worker.held import HeldJob, Phase
from prefill_worker.settings import PrefillWorkerSettings

log = structlog.get_logger(__name__)


class Outcome(Enum):
    ACCEPTED = "accepted"
    GONE = "gone"
    NO_ROOM = "no_room"
    """No decode worker took it within park_s: give the job back."""
    KV_GONE = "kv_gone"
    """There is nothing to offer any more: give the job back."""
    EXPIRED = "expired"
    """The request's deadline has passed: nobody waits for it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverResult:
    outcome: Outcome
    decode_worker: str = ""
    endpoint: str = ""
    """Its inbox."""
    reason: str = ""


class Handover:
    """Offers prefills, finished or about to be pushed."""

    def __init__(
        self,
        *,
        fingerprint: str,
        peers: NoticePeers,
        view: RegistryView,
        settings: PrefillWorkerSettings,
        clock: Callable[[], float],
        rng: random.Random,
        on_answer: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._fingerprint = fingerprint
        self._peers = peers
        self._view = view
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._on_answer = on_answer
        self._room = asyncio.Event()
        self._promises = Promises()
        self._silence = Silence(settings.silent_s)

    def on_room(self) -> None:
        """Some decode worker has room again: wake every job that is parked, or will be for what it has heard so far."""
        told, self._room = self._room, asyncio.Event()
        told.set()

    async def offer(self, held: HeldJob, offer: KvReady | Reserve) -> HandoverResult:
        """Returns when a decode worker accepted, the gateway said Gone, or park_s or the deadline passed with all busy.

        Each decode worker is told how much time is left when it is asked.
        """
        give_up_at = self._clock() + self._settings.park_s
        held.phase = Phase.OFFERING
        while True:
            room = self._room
            if held.remaining_s(self._clock()) <= 0:
                return HandoverResult(outcome=Outcome.EXPIRED)
            result = await self._offer_once(held, offer)
            if result is not None:
                held.phase = Phase.OFFERING
                return result
            if held.is_kv_gone:
                return HandoverResult(outcome=Outcome.KV_GONE)
            now = self._clock()
            if now >= give_up_at:
                return HandoverResult(outcome=Outcome.NO_ROOM)
            held.phase = Phase.PARKED  # also while it is offered again: nothing more is taken for its place
            await _set_within(room, min(give_up_at - now, self._settings.park_retry_s, held.remaining_s(now)))

    async def _offer_once(self, held: HeldJob, offer: KvReady | Reserve) -> HandoverResult | None:
        """Every ready decode worker that fits once, best first; None when all were busy or silent."""
        tokens = held.num_tokens
        candidates = self._silence.heard_of(self._fitting(), self._clock())
        while candidates and not held.is_kv_gone:
            promised = self._promises.totals(self._view.workers)
            target = placement.choose(candidates, tokens, promised, self._rng)
            if target is None:
                return None
            candidates.remove(target)
            offer = dataclasses.replace(offer, remaining_s=held.remaining_s(self._clock()))
            try:
                with self._promises.make(target.worker_id, tokens) as promise:  # others choose while it answers
                    answer = await self._peers.request(target.endpoint, offer)
                    if isinstance(answer, Accepted):
                        promise.keep(answer.clock_ms)
            except PeerUnavailable:
                log.warning("decode_worker_silent", request_id=offer.request_id, worker=target.worker_id)
                self._on_answer("silent")
                self._silence.note(target.worker_id, self._clock())
                continue
            self._on_answer(type(answer).__name__.lower())
            match answer:
                case Accepted():
                    return HandoverResult(
                        outcome=Outcome.ACCEPTED, decode_worker=target.worker_id, endpoint=target.endpoint
                    )
                case Gone(reason=reason):
                    return HandoverResult(outcome=Outcome.GONE, reason=reason)
                case Busy(free_tokens=free_tokens):
                    log.debug("decode_worker_busy", request_id=offer.request_id, free_tokens=free_tokens)
                case _:
                    log.warning("unexpected_answer", request_id=offer.request_id, kind=type(answer).__name__)
        return None

    def _fitting(self) -> list[WorkerRecord]:
        """Ready decode workers that can read this worker's KV; told aloud when there are only others."""
        ready = [worker for worker in self._view.of_role("decode") if worker.state == "ready"]
        fitting = [worker for worker in ready if can_exchange(self._fingerprint, worker.fingerprint)]
        if ready and not fitting:
            log.warning(
                "no_decode_worker_fits", own=self._fingerprint, there=ready[0].fingerprint, num_ready=len(ready)
            )
        return fitting


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
