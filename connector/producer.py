"""P's side of the side channel for one rank: readers' messages and the engine's step metadata -> pins. No sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import structlog

from connector.layout import KvRegion, LayoutError
from connector.pins import Freed, Pins
from connector.side_channel import (
    Abort,
    Answer,
    Claim,
    Claimed,
    Done,
    DoneAck,
    Gone,
    Hello,
    Meta,
    PullRequest,
    Reject,
    Renew,
    Renewed,
    TransferMessage,
    Verified,
    Verify,
)
from connector.step import StepMeta
from connector.tp_plan import consumer_of
from connector.transfers import USED_TWICE, IllegalTransition, Outcome, TransferKey
from pdq.wire.fingerprints import differing

log = structlog.get_logger(__name__)

ReplyTo = Callable[[Answer], object]

EXPIRED: Final = ("lease expired", "no reader came")
"""Causes of freed pins whose reader showed no life (any more)."""


class Producer:
    """Belongs to the IO thread. `now` is in seconds of a monotonic clock."""

    def __init__(
        self,
        *,
        epoch: str,
        rank: int,
        tp_size: int,
        fingerprint: str,
        regions: tuple[KvRegion, ...],
        lease_s: float,
        hold_s: float,
        transport_at: Callable[[], tuple[str, int]],
        num_kv_heads: int = 0,
    ) -> None:
        """`transport_at`: address and generation of this rank's transport now. `num_kv_heads`: see Hello."""
        self._epoch = epoch
        self._rank = rank
        self._tp_size = tp_size
        self._fingerprint = fingerprint
        self._regions = regions
        self._lease_s = lease_s
        self._num_kv_heads = num_kv_heads
        self._transport_at = transport_at
        self._pins = Pins(lease_s=lease_s, hold_s=hold_s)
        self._parked: dict[TransferKey, dict[tuple[str, int], tuple[Claim | Verify, ReplyTo]]] = {}
        """Questions that came before the prefill's end was known here."""
        self._readers: dict[TransferKey, ReplyTo] = {}
        """The way to whoever claimed last, to tell of this rank's end."""
        self._unpinned: dict[str, TransferKey] = {}
        """Prefills whose key another one has: no reader can be told of them."""
        self._freed: list[Freed] = []

    def __len__(self) -> int:
        """Pins that hold blocks."""
        return len(self._pins)

    @property
    def has_parked(self) -> bool:
        """A reader waits for the end of its prefill. Any thread."""
        return bool(self._parked)

    def apply(self, meta: StepMeta, now: float) -> None:
        """P's part of a step. A mistake in one entry is logged and harms no other.

        A prefill that can't be pinned is freed as soon as it has ended: the engine waits for its report.
        """
        for entry in meta.expected:
            key = TransferKey(transfer_id=entry.transfer_id, pair=entry.pair)
            if self._pins.is_taken(key, entry.engine_request_id):
                self._unpinned[entry.engine_request_id] = key
                continue
            with _logged(entry.engine_request_id):
                self._pins.expect(entry.engine_request_id, key)
        for request_id in meta.forgotten:
            if self._unpinned.pop(request_id, None) is None:
                with _logged(request_id):
                    self._answer_parked(self._pins.forget(request_id, now), now)
        for request_id in meta.pinned:
            if (used := self._unpinned.pop(request_id, None)) is not None:
                self._freed.append(Freed(engine_request_id=request_id, key=used, cause=USED_TWICE))
                continue
            with _logged(request_id):
                self._answer_parked(self._pins.prefilled(request_id, now), now)
        for request_id in meta.released:
            self._pins.release(request_id, now)

    def on_message(self, message: PullRequest, reply: ReplyTo, now: float) -> None:
        """Answers at once, but for a reader whose prefill is about to end."""
        if isinstance(message, Hello):
            reply(self._greet(message))
        elif message.epoch != self._epoch:
            reply(self._other_epoch(message))
        elif isinstance(message, Renew):
            refusal = self._pins.renew(message.key, message.consumer, now)
            reply(_gone(message, refusal) if refusal else _same(Renewed, message))
        elif isinstance(message, Claim):
            self._claim(message, reply, now)
        elif isinstance(message, Verify):
            self._verify(message, reply, now)
        else:
            self._done(message, now)
            reply(_same(DoneAck, message))

    def tick(self, now: float) -> None:
        self._pins.expire(now)

    def take_freed(self) -> list[Freed]:
        """Each pin once."""
        for pin in (pinned := self._pins.take_freed()):
            self._readers.pop(pin.key, None)
        freed, self._freed = self._freed + pinned, []
        for pin in freed:
            log.debug("kv_pin_freed", request_id=pin.key.transfer_id, pair=str(pin.key.pair), cause=pin.cause)
            if pin.cause in EXPIRED:
                log.warning("kv_pin_expired", request_id=pin.key.transfer_id, pair=str(pin.key.pair), cause=pin.cause)
        return freed

    def abort_readers(self, reason: str) -> None:
        """This rank is going: tells whoever may be reading."""
        for key, reply in self._readers.items():
            if self._pins.claims_of(key):
                reply(Abort(epoch=self._epoch, transfer_id=key.transfer_id, pair=key.pair, reason=reason))

    def _greet(self, hello: Hello) -> Meta | Reject:
        if hello.epoch != self._epoch:
            return Reject(epoch=hello.epoch, reason=f"P was restarted: epoch {self._epoch}, not {hello.epoch}")
        differences = differing(self._fingerprint, hello.fingerprint, ignored=("tp",))
        if differences:
            log.error("kv_peer_refused", peer=hello.consumer, differences=differences)
            return Reject(epoch=hello.epoch, reason=f"fingerprints differ (here is P, the peer is D): {differences}")
        return Meta(
            epoch=self._epoch,
            rank=self._rank,
            tp_size=self._tp_size,
            regions=self._regions,
            transport_address=self._transport_at()[0],
            num_kv_heads=self._num_kv_heads,
        )

    def _claim(self, claim: Claim, reply: ReplyTo, now: float) -> None:
        try:
            self._readers_of(claim.tp_size)
        except LayoutError as exc:
            reply(_gone(claim, str(exc)))
            return
        if self._must_wait(claim, reply, now):
            return
        refusal = self._pins.claim(claim.key, claim.consumer, claim.rank, now)
        if refusal:
            reply(_gone(claim, refusal))
            return
        self._readers[claim.key] = reply
        address, generation = self._transport_at()
        reply(
            Claimed(
                epoch=self._epoch,
                transfer_id=claim.transfer_id,
                pair=claim.pair,
                lease_s=self._lease_s,
                transport_address=address,
                transport_generation=generation,
            )
        )

    def _verify(self, verify: Verify, reply: ReplyTo, now: float) -> None:
        try:
            expected = self._readers_of(verify.tp_size)
        except LayoutError as exc:
            reply(_gone(verify, str(exc)))
            return
        if self._must_wait(verify, reply, now):
            return
        refusal = self._pins.verify(verify.key, verify.consumer, verify.rank, verify.load, now)
        if refusal:
            reply(_gone(verify, refusal))
            return
        if verify.is_last:
            self._pins.done(verify.key, verify.consumer, {verify.rank}, expected, Outcome.OK, now)
        address, _ = self._transport_at()
        reply(
            Verified(
                epoch=self._epoch,
                transfer_id=verify.transfer_id,
                pair=verify.pair,
                load=verify.load,
                transport_address=address,
            )
        )

    def _readers_of(self, decode_tp: int) -> frozenset[int]:
        """The ranks of D that must be done before blocks are free. Raises LayoutError."""
        return frozenset({consumer_of(self._rank, self._tp_size, decode_tp)})

    def _must_wait(self, message: Claim | Verify, reply: ReplyTo, now: float) -> bool:
        """True: kept, to be answered when the prefill has ended."""
        if not self._pins.is_expected(message.key):
            return False
        self._pins.renew(message.key, message.consumer, now)
        self._parked.setdefault(message.key, {})[message.consumer, message.rank] = (message, reply)
        return True

    def _done(self, done: Done, now: float) -> None:
        try:
            expected = self._readers_of(done.tp_size)
        except LayoutError:
            expected = frozenset({done.rank if done.rank is not None else 0})
        ranks = expected if done.rank is None else frozenset({done.rank})
        if done.outcome is not Outcome.OK and (parked := self._parked.get(done.key)):
            for rank in ranks:
                parked.pop((done.consumer, rank), None)
        if done.outcome is Outcome.FAILED:
            log.warning(
                "kv_reader_failed",
                request_id=done.transfer_id,
                pair=str(done.pair),
                peer=done.consumer,
                rank=done.rank,
                cause=done.reason,
            )
        self._pins.done(done.key, done.consumer, ranks, expected, done.outcome, now)

    def _answer_parked(self, key: TransferKey, now: float) -> None:
        for message, reply in self._parked.pop(key, {}).values():
            if isinstance(message, Claim):
                self._claim(message, reply, now)
            else:
                self._verify(message, reply, now)

    def _other_epoch(self, message: PullRequest) -> Answer:
        assert isinstance(message, TransferMessage)
        if isinstance(message, Done):
            return _same(DoneAck, message)
        return _gone(message, f"P was restarted: epoch {self._epoch}, not {message.epoch}")


@contextlib.contextmanager
def _logged(engine_request_id: str) -> Iterator[None]:
    try:
        yield
    except IllegalTransition as exc:
        log.error("kv_step_entry_refused", engine_request_id=engine_request_id, error=str(exc))


def _gone(message: TransferMessage, reason: str) -> Gone:
    return Gone(epoch=message.epoch, transfer_id=message.transfer_id, pair=message.pair, reason=reason)


def _same(answer: type[Renewed] | type[DoneAck], message: TransferMessage) -> Answer:
    return answer(epoch=message.epoch, transfer_id=message.transfer_id, pair=message.pair)
