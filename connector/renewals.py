"""What D's scheduler half says to P: renewals from a request's arrival to its load, and that none will come. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from connector.asks import Asks
from connector.settings import ConnectorSettings
from connector.side_channel import Abort, Answer, Done, DoneAck, Gone, Renew, Renewed, Request, endpoint_of
from connector.transfers import Outcome, TransferKey
from pdq.wire.types import KvTicket

_FIRST_AFTER_S = 0.1
"""Most requests are loaded before; P holds the blocks far longer for a reader that has not shown up."""


@dataclass(slots=True)
class _Waiting:
    engine_request_id: str
    ticket: KvTicket
    renew_at: float
    answered_at: dict[str, float]
    """Per P rank's endpoint."""


class Renewals:
    """`now` is in seconds of a monotonic clock."""

    def __init__(self, settings: ConnectorSettings, *, consumer: str, tp_size: int) -> None:
        self._settings = settings
        self._consumer = consumer
        self._tp_size = tp_size
        self._waiting: dict[str, _Waiting] = {}
        self._id_of: dict[TransferKey, str] = {}
        self._dones: Asks[tuple[str, TransferKey]] = Asks(every_s=settings.kv_answer_s, tries=settings.kv_answer_tries)
        self._gone: dict[str, str] = {}

    def start(self, engine_request_id: str, ticket: KvTicket, now: float) -> None:
        answered_at = dict.fromkeys(endpoints_of(ticket), now)
        first_at = now + min(_FIRST_AFTER_S, self._settings.kv_lease_s / 3)
        self._waiting[engine_request_id] = _Waiting(engine_request_id, ticket, first_at, answered_at)
        self._id_of[key_of(ticket)] = engine_request_id

    def stop(self, engine_request_id: str) -> None:
        """The worker half claims now, or nobody will."""
        waiting = self._waiting.pop(engine_request_id, None)
        if waiting is not None:
            self._id_of.pop(key_of(waiting.ticket), None)

    def say_done(self, ticket: KvTicket, outcome: Outcome, reason: str, now: float) -> None:
        """No rank of this engine will claim (any more); repeated until every P rank has acknowledged."""
        key = key_of(ticket)
        done = Done(
            epoch=ticket.epoch,
            transfer_id=key.transfer_id,
            pair=key.pair,
            consumer=self._consumer,
            rank=None,
            tp_size=self._tp_size,
            outcome=outcome,
            reason=reason,
        )
        for endpoint in endpoints_of(ticket):
            self._dones.put((endpoint, key), endpoint, done, now)

    def on_message(self, endpoint: str, answer: Answer, now: float) -> None:
        if isinstance(answer, DoneAck):
            self._dones.answered((endpoint, answer.key))
        elif isinstance(answer, Renewed | Gone | Abort) and (found := self._id_of.get(answer.key)):
            if isinstance(answer, Renewed):
                self._waiting[found].answered_at[endpoint] = now
            else:
                self._lose(found, f"P says gone: {answer.reason}")

    def tick(self, now: float) -> list[tuple[str, Request]]:
        """(endpoint, message) to be sent now."""
        sends: list[tuple[str, Request]] = []
        for waiting in list(self._waiting.values()):
            if waiting.renew_at > now:
                continue
            if now - min(waiting.answered_at.values()) > self._settings.kv_lease_s:
                self._lose(waiting.engine_request_id, f"P has not answered for {self._settings.kv_lease_s:g} s")
                continue
            waiting.renew_at = now + self._settings.kv_lease_s / 3
            key = key_of(waiting.ticket)
            renew = Renew(
                epoch=waiting.ticket.epoch, transfer_id=key.transfer_id, pair=key.pair, consumer=self._consumer
            )
            sends += [(endpoint, renew) for endpoint in waiting.answered_at]
        dones, _ = self._dones.due(now)
        return sends + dones

    def next_at(self) -> float | None:
        times = [waiting.renew_at for waiting in self._waiting.values()]
        if (done_at := self._dones.next_at()) is not None:
            times.append(done_at)
        return min(times, default=None)

    def take_gone(self) -> dict[str, str]:
        """Requests whose KV P no longer has, with the reason; each once."""
        gone, self._gone = self._gone, {}
        return gone

    def _lose(self, engine_request_id: str, reason: str) -> None:
        self._gone[engine_request_id] = reason
        self.stop(engine_request_id)


def key_of(ticket: KvTicket) -> TransferKey:
    return TransferKey(transfer_id=ticket.transfer_id, pair=ticket.pair)


def endpoints_of(ticket: KvTicket) -> list[str]:
    """The side channels of all ranks of P."""
    return [endpoint_of(ticket.host, ticket.port + rank) for rank in range(ticket.tp_size)]
