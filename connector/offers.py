"""What D's scheduler half says to P in push: where its blocks are, again and again; or that none will be. Pure.

RECV_READY is the sign of life of both sides: P's ranks answer each one. Silence, or Gone, loses the push.
"""

from __future__ import annotations

from dataclasses import dataclass

from connector.asks import Asks
from connector.settings import ConnectorSettings
from connector.side_channel import Answer, Cancel, Cancelled, Gone, RecvNoted, RecvReady, Request, endpoint_of
from connector.step import Lost
from connector.transfers import TransferKey
from pdq.wire.types import KvSource


@dataclass(slots=True, kw_only=True)
class _Offer:
    engine_request_id: str
    ready: RecvReady
    is_once: bool
    endpoints: list[str]
    """Of P's ranks."""
    send_at: float
    unheard: set[str]
    """Endpoints that have not answered since the last round began."""
    tries_left: int
    """In this round."""


class Offers:
    """`now` is in seconds of a monotonic clock."""

    def __init__(self, settings: ConnectorSettings, *, consumer: str) -> None:
        self._settings = settings
        self._consumer = consumer
        self._offers: dict[str, _Offer] = {}
        self._id_of: dict[TransferKey, str] = {}
        self._cancels: Asks[tuple[str, TransferKey]] = Asks(
            every_s=settings.kv_answer_s, tries=settings.kv_answer_tries
        )
        self._lost: list[Lost] = []

    def start(self, engine_request_id: str, source: KvSource, ready: RecvReady, now: float, *, is_once: bool) -> None:
        """A round every third of a lease until `stop`: to each rank of P until it answers. `is_once`: one round."""
        endpoints = endpoints_of(source)
        self._offers[engine_request_id] = _Offer(
            engine_request_id=engine_request_id,
            ready=ready,
            is_once=is_once,
            endpoints=endpoints,
            send_at=now,
            unheard=set(endpoints),
            tries_left=self._settings.kv_answer_tries,
        )
        self._id_of[ready.key] = engine_request_id

    def stop(self, engine_request_id: str) -> None:
        """It was written, or the worker half cancels it."""
        offer = self._offers.pop(engine_request_id, None)
        if offer is not None:
            self._id_of.pop(offer.ready.key, None)

    def say_cancel(self, source: KvSource, key: TransferKey, reason: str, now: float) -> None:
        """No block was ever offered; repeated until every rank of P has acknowledged."""
        cancel = Cancel(
            epoch=source.epoch, transfer_id=key.transfer_id, pair=key.pair, consumer=self._consumer, reason=reason
        )
        for endpoint in endpoints_of(source):
            self._cancels.put((endpoint, key), endpoint, cancel, now)

    def on_message(self, endpoint: str, answer: Answer, now: float) -> None:
        if isinstance(answer, Cancelled):
            self._cancels.answered((endpoint, answer.key))
        elif isinstance(answer, RecvNoted | Gone) and (found := self._id_of.get(answer.key)):
            offer = self._offers[found]
            was_heard = not offer.unheard
            offer.unheard.discard(endpoint)
            if isinstance(answer, Gone) and not offer.is_once:
                self._lose(offer, f"P says gone: {answer.reason}", is_silent=False)
            elif offer.is_once and not offer.unheard:
                self.stop(found)
            elif not offer.unheard and not was_heard:
                offer.send_at = now + self._settings.kv_lease_s / 3
                offer.tries_left = self._settings.kv_answer_tries

    def tick(self, now: float) -> list[tuple[str, Request]]:
        """(endpoint, message) to be sent now."""
        sends: list[tuple[str, Request]] = []
        for offer in list(self._offers.values()):
            if offer.send_at > now:
                continue
            if offer.unheard and not offer.tries_left:
                self._lose(offer, f"P has not answered {self._settings.kv_answer_tries} times", is_silent=True)
                continue
            if not offer.unheard:
                offer.unheard.update(offer.endpoints)
            offer.tries_left -= 1
            offer.send_at = now + self._settings.kv_answer_s
            sends += [(endpoint, offer.ready) for endpoint in offer.endpoints if endpoint in offer.unheard]
        cancels, _ = self._cancels.due(now)
        return sends + cancels

    def next_at(self) -> float | None:
        times = [offer.send_at for offer in self._offers.values()]
        if (cancel_at := self._cancels.next_at()) is not None:
            times.append(cancel_at)
        return min(times, default=None)

    def take_lost(self) -> list[Lost]:
        """Requests that P will not write (all of); each once."""
        lost, self._lost = self._lost, []
        return lost

    def _lose(self, offer: _Offer, reason: str, *, is_silent: bool) -> None:
        if not offer.is_once:
            self._lost.append(Lost(offer.engine_request_id, reason, is_silent))
        self.stop(offer.engine_request_id)


def endpoints_of(source: KvSource) -> list[str]:
    """The side channels of all ranks of P."""
    return [endpoint_of(source.host, source.port + rank) for rank in range(source.tp_size)]
