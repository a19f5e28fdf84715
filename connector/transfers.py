"""Life of one transfer: the laws, the words and the two state tables. Pure. `pins.py` is P's side, `loads.py` D's.

Laws, tested with random event sequences:

1. Blocks are freed exactly once.
2. Never while a peer may still write them, or read them unnoticed. Proof that nothing moves any more is one of: the
   end of the call that moved it; the drain acknowledgement of that (transfer, pair) from every rank; the death of the
   writer's process; a transport fence of this side. Time alone is no proof for memory that a *peer writes*.
   In pull nobody writes P's memory: a reader that comes too late harms only itself, and VERIFY tells it so (law 3).
   That is why the end of a lease, which is nothing but time, may free P's blocks. D's blocks are written by D's own
   reads: they are given back when the call in flight has ended well, or after a fence.
3. D decodes only from blocks whose pin at P lives when VERIFY comes, after the whole read. A ticket leaves P when all
   bytes are in place; its blocks are kept from then on and freed once. So a pin that lives has lived during the whole
   read, and a read needs no CLAIM to be valid. CLAIM makes P's `release` wait for the reader; for small reads that
   costs more than a read in vain.
4. Every message carries (epoch, transfer id, pair); others are answered GONE. Verdicts stay as tombstones for two
   leases; a higher pair is another transfer with other blocks.
5. Every wait has a deadline on both sides.

P, per rank                                          D, per leg (one P rank that this rank reads from)
  EXPECTED --prefilled--> HELD                         GREETING  --met--> CLAIMING --granted--> READING
  HELD --attended--> LEASED --drain--> DRAINING        READING   --read--> VERIFYING --verified--> ENDED
  HELD, LEASED, DRAINING --free--> FREED               READING   --stop--> DRAINING --read, drained--> ENDED
  EXPECTED --forget--> FREED                           READING, DRAINING --broken--> FENCING --fenced--> ENDED
                                                       GREETING, CLAIMING, VERIFYING --stop--> ENDED
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from pdq.wire.types import Pair

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalTransition(Exception):
    """Our own mistake: an event that this state can't meet."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TransferKey:
    """One transfer: request and try."""

    transfer_id: str
    pair: Pair

    def __str__(self) -> str:
        return f"{self.transfer_id}:{self.pair}"


USED_TWICE = "kv params: this KV ticket is used by another request: one at a time"
"""Why a request of this engine is not followed: its answers would be the other's."""


class Outcome(Enum):
    """How a reader ended."""

    OK = "ok"
    FAILED = "failed"
    """P keeps the blocks to the lease's end: the reader may come again, or another one."""
    CANCELLED = "cancelled"


class PinState(Enum):
    EXPECTED = "expected"
    """The prefill runs; a reader may already know of it."""
    HELD = "held"
    """Prefilled; no reader has shown up: ends by `release`, the first RENEW or CLAIM, or `hold_s`."""
    LEASED = "leased"
    """Some reader renews."""
    DRAINING = "draining"
    """To be freed as soon as no claim is active."""
    FREED = "freed"
    """Tombstone: answers GONE for two leases."""


class PinEvent(Enum):
    PREFILLED = "prefilled"
    FORGET = "forget"
    ATTENDED = "attended"
    DRAIN = "drain"
    FREE = "free"


PIN_TABLE: Mapping[tuple[PinState, PinEvent], PinState] = {
    (PinState.EXPECTED, PinEvent.PREFILLED): PinState.HELD,
    (PinState.EXPECTED, PinEvent.FORGET): PinState.FREED,
    (PinState.HELD, PinEvent.ATTENDED): PinState.LEASED,
    (PinState.HELD, PinEvent.FREE): PinState.FREED,
    (PinState.LEASED, PinEvent.DRAIN): PinState.DRAINING,
    (PinState.LEASED, PinEvent.FREE): PinState.FREED,
    (PinState.DRAINING, PinEvent.FREE): PinState.FREED,
}


class LegState(Enum):
    GREETING = "greeting"
    CLAIMING = "claiming"
    READING = "reading"
    """The only state in which D's blocks are written, beside the next two."""
    DRAINING = "draining"
    """Not wanted any more; the call in flight has not ended."""
    FENCING = "fencing"
    """A call failed; bytes may move until the transport was fenced."""
    VERIFYING = "verifying"
    ENDED = "ended"


class LegEvent(Enum):
    MET = "met"
    GRANTED = "granted"
    """By P's answer to CLAIM, or for a small read by the ticket."""
    READ = "read"
    DRAINED = "drained"
    BROKEN = "broken"
    FENCED = "fenced"
    VERIFIED = "verified"
    STOP = "stop"
    """It can't or needn't go on: cancelled, its deadline passed, or P says GONE or REJECT, or does not answer."""


LEG_TABLE: Mapping[tuple[LegState, LegEvent], LegState] = {
    (LegState.GREETING, LegEvent.MET): LegState.CLAIMING,
    (LegState.GREETING, LegEvent.STOP): LegState.ENDED,
    (LegState.CLAIMING, LegEvent.GRANTED): LegState.READING,
    (LegState.CLAIMING, LegEvent.STOP): LegState.ENDED,
    (LegState.READING, LegEvent.READ): LegState.VERIFYING,
    (LegState.READING, LegEvent.BROKEN): LegState.FENCING,
    (LegState.READING, LegEvent.STOP): LegState.DRAINING,
    (LegState.DRAINING, LegEvent.READ): LegState.ENDED,
    (LegState.DRAINING, LegEvent.DRAINED): LegState.ENDED,
    (LegState.DRAINING, LegEvent.BROKEN): LegState.FENCING,
    (LegState.FENCING, LegEvent.FENCED): LegState.ENDED,
    (LegState.VERIFYING, LegEvent.VERIFIED): LegState.ENDED,
    (LegState.VERIFYING, LegEvent.STOP): LegState.ENDED,
}


def next_state(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """Raises IllegalTransition when the table has no such line."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.value} in state {state.value}") from None
