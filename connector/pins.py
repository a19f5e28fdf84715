"""P's side of all transfers of one rank: who may read which pinned prefill, and when its blocks are free. Pure.

A reader is a consumer (one D engine process, named by its epoch) with one or more ranks. Its lease is renewed by any
of its messages. Several consumers may come for one pin, when P has offered it twice: the blocks stay until no claim
is active, and only the first that is done ends the pin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from connector.transfers import PIN_TABLE, IllegalTransition, Outcome, PinEvent, PinState, TransferKey, next_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Freed:
    """A pin whose blocks nobody may read any more."""

    engine_request_id: str
    key: TransferKey
    cause: str


@dataclass(slots=True, kw_only=True)
class Pin:
    key: TransferKey
    engine_request_id: str
    state: PinState = PinState.EXPECTED
    hold_until: float = 0.0
    leases: dict[str, float] = field(default_factory=dict)
    """Per consumer: until when it counts as alive."""
    claims: set[tuple[str, int]] = field(default_factory=set)
    """(consumer, rank) that may be reading now. Only consumers with a lease have any."""
    verified: dict[tuple[str, int], int] = field(default_factory=dict)
    """The last load of (consumer, rank) that was told so."""
    done: dict[str, set[int]] = field(default_factory=dict)
    cancelled: dict[str, set[int]] = field(default_factory=dict)
    unwanted: str | None = None
    """Why no new reader is let in."""
    cause: str = ""
    """Why it was freed: what a late reader is told."""

    def fire(self, event: PinEvent) -> None:
        self.state = next_state(PIN_TABLE, self.state, event)


class Pins:
    """Every method takes `now` in seconds of a monotonic clock. Refusals are texts; None means granted."""

    def __init__(self, *, lease_s: float, hold_s: float) -> None:
        self._lease_s = lease_s
        self._hold_s = hold_s
        self._pins: dict[TransferKey, Pin] = {}
        self._key_of: dict[str, TransferKey] = {}
        """Of those that are not freed."""
        self._tombstones: deque[tuple[float, TransferKey]] = deque()
        self._freed: list[Freed] = []

    def __len__(self) -> int:
        """Pins that hold blocks."""
        return sum(self._pins[key].state is not PinState.EXPECTED for key in self._key_of.values())

    # What P's own engine says. Raises IllegalTransition when it contradicts itself.

    def expect(self, engine_request_id: str, key: TransferKey) -> None:
        if key in self._pins or engine_request_id in self._key_of:
            raise IllegalTransition(f"{engine_request_id} ({key}) is expected twice")
        self._pins[key] = Pin(key=key, engine_request_id=engine_request_id)
        self._key_of[engine_request_id] = key

    def prefilled(self, engine_request_id: str, now: float) -> TransferKey:
        """Blocks are complete and stay until `take_freed` has the id."""
        pin = self._own(engine_request_id)
        pin.fire(PinEvent.PREFILLED)
        pin.hold_until = now + self._hold_s
        if pin.leases:
            pin.fire(PinEvent.ATTENDED)
        self._settle(pin, now)
        return pin.key

    def forget(self, engine_request_id: str, now: float) -> TransferKey:
        """The prefill ended without KV. Nothing is freed, so nothing is reported."""
        pin = self._own(engine_request_id)
        pin.fire(PinEvent.FORGET)
        self._bury(pin, "prefill was aborted", now)
        return pin.key

    def release(self, engine_request_id: str, now: float) -> None:
        """Nobody will come. Ids that are not pinned (any more) are ignored: a release may cross a report."""
        key = self._key_of.get(engine_request_id)
        if key is not None and (pin := self._pins[key]).state is not PinState.EXPECTED:
            pin.unwanted = pin.unwanted or "released"
            self._settle(pin, now)

    # What readers say.

    def renew(self, key: TransferKey, consumer: str, now: float) -> str | None:
        pin = self._live(key, now)
        if isinstance(pin, str):
            return pin
        if pin.unwanted and not any(claimant == consumer for claimant, _ in pin.claims):
            return pin.unwanted
        self._attend(pin, consumer, now)
        return None

    def claim(self, key: TransferKey, consumer: str, rank: int, now: float) -> str | None:
        """None: that rank may read until its lease ends. Check `is_expected` first: a claim then has to wait."""
        pin = self._live(key, now)
        if isinstance(pin, str):
            return pin
        if pin.state is PinState.EXPECTED:
            raise IllegalTransition(f"{key} is claimed before its prefill has ended")
        if rank in pin.done.get(consumer, ()) or rank in pin.cancelled.get(consumer, ()):
            return "this reader is done"
        if pin.unwanted and (consumer, rank) not in pin.claims:
            return pin.unwanted
        self._attend(pin, consumer, now)
        pin.claims.add((consumer, rank))
        return None

    def is_taken(self, key: TransferKey, engine_request_id: str) -> bool:
        """By another prefill, or by one that has ended not long ago."""
        pin = self._pins.get(key)
        return pin is not None and (pin.engine_request_id != engine_request_id or pin.state is PinState.FREED)

    def is_expected(self, key: TransferKey) -> bool:
        return key in self._pins and self._pins[key].state is PinState.EXPECTED

    def verify(self, key: TransferKey, consumer: str, rank: int, load: int, now: float) -> str | None:
        """None: the blocks have been pinned ever since the prefill, so what was read is valid.

        The reader's ticket was made when the bytes were in place, and a pin is freed once: one that lives now has lived
        since then, claimed or not. A repeated question gets the same answer when the first has freed the pin; one of
        another load of that rank (`load` counts them) doesn't: it may have read what came after. Check `is_expected`
        first: the question then has to wait.
        """
        if (known := self._pins.get(key)) is not None and known.verified.get((consumer, rank)) == load:
            return None
        pin = self._live(key, now)
        if isinstance(pin, str):
            return pin
        if pin.state is PinState.EXPECTED:
            raise IllegalTransition(f"{key} is verified before its prefill has ended")
        self._attend(pin, consumer, now)
        pin.verified[consumer, rank] = load
        return None

    def done(
        self,
        key: TransferKey,
        consumer: str,
        ranks: Iterable[int],
        expected_ranks: frozenset[int],
        outcome: Outcome,
        now: float,
    ) -> None:
        """These ranks read no more. Unknown, repeated and late ones change nothing."""
        pin = self._live(key, now)
        if isinstance(pin, str):
            return
        ranks = set(ranks)
        if pin.state is PinState.HELD:
            if outcome is Outcome.FAILED:
                return  # failed before it renewed or claimed: others may still come
            pin.fire(PinEvent.ATTENDED)
        pin.claims -= {(consumer, rank) for rank in ranks}
        if outcome is not Outcome.FAILED:
            ended = (pin.done if outcome is Outcome.OK else pin.cancelled).setdefault(consumer, set())
            ended |= ranks
            if pin.done.get(consumer, set()) >= expected_ranks:
                pin.unwanted = pin.unwanted or "was read"
            elif pin.done.get(consumer, set()) | pin.cancelled.get(consumer, set()) >= expected_ranks:
                pin.leases.pop(consumer, None)
                if not pin.leases:
                    pin.unwanted = pin.unwanted or "reader cancelled"
        self._settle(pin, now)

    # Time, and what came of it.

    def expire(self, now: float) -> None:
        """Ends leases and holds that are over, and forgets old tombstones."""
        for key in list(self._key_of.values()):
            self._settle(self._pins[key], now)
        while self._tombstones and self._tombstones[0][0] <= now:
            _, key = self._tombstones.popleft()
            del self._pins[key]

    def take_freed(self) -> list[Freed]:
        """Each pin once."""
        freed, self._freed = self._freed, []
        return freed

    def claims_of(self, key: TransferKey) -> int:
        return len(self._pins[key].claims) if key in self._pins else 0

    def _own(self, engine_request_id: str) -> Pin:
        key = self._key_of.get(engine_request_id)
        if key is None:
            raise IllegalTransition(f"{engine_request_id} is not expected")
        return self._pins[key]

    def _live(self, key: TransferKey, now: float) -> Pin | str:
        pin = self._pins.get(key)
        if pin is None:
            return "unknown"
        self._settle(pin, now)
        return pin.cause if pin.state is PinState.FREED else pin

    def _attend(self, pin: Pin, consumer: str, now: float) -> None:
        pin.leases[consumer] = now + self._lease_s
        if pin.state is PinState.HELD:
            pin.fire(PinEvent.ATTENDED)

    def _settle(self, pin: Pin, now: float) -> None:
        """Ends what is over by `now`, then frees the pin if nobody holds it."""
        if pin.state is PinState.FREED:
            return
        for consumer in [consumer for consumer, until in pin.leases.items() if until <= now]:
            del pin.leases[consumer]
            pin.claims = {claim for claim in pin.claims if claim[0] != consumer}
        if pin.state is PinState.EXPECTED:
            return
        if pin.state is PinState.HELD:
            if pin.unwanted or pin.hold_until <= now:
                self._free(pin, pin.unwanted or "no reader came", now)
            return
        if pin.claims:
            if pin.unwanted and pin.state is PinState.LEASED:
                pin.fire(PinEvent.DRAIN)
        elif pin.unwanted or not pin.leases:
            self._free(pin, pin.unwanted or "lease expired", now)

    def _free(self, pin: Pin, cause: str, now: float) -> None:
        pin.fire(PinEvent.FREE)
        self._freed.append(Freed(engine_request_id=pin.engine_request_id, key=pin.key, cause=cause))
        self._bury(pin, cause, now)

    def _bury(self, pin: Pin, cause: str, now: float) -> None:
        pin.cause = cause
        pin.claims.clear()
        pin.leases.clear()
        del self._key_of[pin.engine_request_id]
        self._tombstones.append((now + 2 * self._lease_s, pin.key))
