"""Life of one push: the laws of `transfers` for memory that a peer writes, and the two state tables. Pure.

Here the writer is P, and D's blocks are at stake. For them time is no proof: a P that was stopped in the middle of a
call writes on when it wakes up. So each P rank asks (`Open`) before it writes, and D gives blocks back when every rank

- never was answered: it knows no address to write to, and will be told Gone; or
- said that it has ended (PushDone, PushFail, Cancelled) and that all its calls ended well; or
- was shut out by a fence: D's rank replaced its transport, and no address that was told before leads anywhere.

A rank that does not answer is fenced, alive or dead: a dead one's last bytes may still be in D's own socket buffers.
A fence shuts out everybody: whoever still writes for others asks again (`Open` with the broken generation) and writes
all once more. P fences too after a failed call, so that nothing reads P's blocks when it frees them.

P, per rank                                              D, per leg (one P rank that writes here)
  AWAITING --ready--> GREETING --met--> OPENING            AWAITED --open--> OPEN
  OPENING --opened--> WRITING --written--> TELLING         AWAITED, OPEN --done--> DONE
  WRITING --broken--> OPENING (again)                      AWAITED, OPEN --drained--> SAFE
  AWAITING --stop--> ENDED                                 AWAITED --stop--> SAFE
  GREETING --stop--> TELLING                               OPEN --stop--> CANCELLING --done, drained--> SAFE
  OPENING, WRITING --stop--> DRAINING --drained--> TELLING OPEN, CANCELLING --doubt--> FENCING
  GREETING, OPENING, TELLING --told--> ENDED               OPEN --fenced--> AWAITED
                                                           CANCELLING, FENCING --fenced--> SAFE
P frees its blocks in ENDED, and not before its engine has said that it is through with the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class PushState(Enum):
    AWAITING = "awaiting"
    """D has not said where its blocks are."""
    GREETING = "greeting"
    OPENING = "opening"
    """D's rank was asked for its transport's address."""
    WRITING = "writing"
    """The only state that starts calls; layers are written as they become final."""
    DRAINING = "draining"
    """Not wanted any more; calls have not ended."""
    TELLING = "telling"
    """All calls have ended; D's rank is told how, until it acknowledges."""
    ENDED = "ended"
    """Tombstone for two leases."""


class PushEvent(Enum):
    READY = "ready"
    MET = "met"
    OPENED = "opened"
    WRITTEN = "written"
    BROKEN = "broken"
    STOP = "stop"
    DRAINED = "drained"
    TOLD = "told"
    """D knows, or can't be reached."""


PUSH_TABLE: Mapping[tuple[PushState, PushEvent], PushState] = {
    (PushState.AWAITING, PushEvent.READY): PushState.GREETING,
    (PushState.AWAITING, PushEvent.STOP): PushState.ENDED,
    (PushState.GREETING, PushEvent.MET): PushState.OPENING,
    (PushState.GREETING, PushEvent.WRITTEN): PushState.TELLING,  # D needs nothing
    (PushState.GREETING, PushEvent.STOP): PushState.TELLING,
    (PushState.GREETING, PushEvent.TOLD): PushState.ENDED,
    (PushState.OPENING, PushEvent.OPENED): PushState.WRITING,
    (PushState.OPENING, PushEvent.STOP): PushState.DRAINING,
    (PushState.OPENING, PushEvent.TOLD): PushState.ENDED,
    (PushState.WRITING, PushEvent.WRITTEN): PushState.TELLING,
    (PushState.WRITING, PushEvent.BROKEN): PushState.OPENING,
    (PushState.WRITING, PushEvent.STOP): PushState.DRAINING,
    (PushState.DRAINING, PushEvent.DRAINED): PushState.TELLING,
    (PushState.TELLING, PushEvent.TOLD): PushState.ENDED,
}


class RecvState(Enum):
    AWAITED = "awaited"
    """That rank knows no address to write to."""
    OPEN = "open"
    """It may write."""
    CANCELLING = "cancelling"
    """It was told to stop and has not answered."""
    FENCING = "fencing"
    """It may write until the fence."""
    DONE = "done"
    """It has written everything."""
    SAFE = "safe"
    """It writes no more; not everything was written."""


class RecvEvent(Enum):
    OPEN = "open"
    DONE = "done"
    DRAINED = "drained"
    STOP = "stop"
    DOUBT = "doubt"
    """Some call failed, or the rank does not answer."""
    FENCED = "fenced"


RECV_TABLE: Mapping[tuple[RecvState, RecvEvent], RecvState] = {
    (RecvState.AWAITED, RecvEvent.OPEN): RecvState.OPEN,
    (RecvState.AWAITED, RecvEvent.DONE): RecvState.DONE,
    (RecvState.AWAITED, RecvEvent.DRAINED): RecvState.SAFE,
    (RecvState.AWAITED, RecvEvent.STOP): RecvState.SAFE,
    (RecvState.AWAITED, RecvEvent.DOUBT): RecvState.SAFE,  # what failed went to a transport that is gone
    (RecvState.AWAITED, RecvEvent.FENCED): RecvState.AWAITED,
    (RecvState.OPEN, RecvEvent.OPEN): RecvState.OPEN,
    (RecvState.OPEN, RecvEvent.DONE): RecvState.DONE,
    (RecvState.OPEN, RecvEvent.DRAINED): RecvState.SAFE,
    (RecvState.OPEN, RecvEvent.STOP): RecvState.CANCELLING,
    (RecvState.OPEN, RecvEvent.DOUBT): RecvState.FENCING,
    (RecvState.OPEN, RecvEvent.FENCED): RecvState.AWAITED,
    (RecvState.CANCELLING, RecvEvent.DONE): RecvState.SAFE,
    (RecvState.CANCELLING, RecvEvent.DRAINED): RecvState.SAFE,
    (RecvState.CANCELLING, RecvEvent.DOUBT): RecvState.FENCING,
    (RecvState.CANCELLING, RecvEvent.FENCED): RecvState.SAFE,
    (RecvState.FENCING, RecvEvent.FENCED): RecvState.SAFE,
}
SETTLED = frozenset({RecvState.DONE, RecvState.SAFE})
