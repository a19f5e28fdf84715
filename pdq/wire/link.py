"""Numbered frames over a channel that may lose, repeat and reorder: each arrives once, in order. Pure: `now` is given.

    sender                                              receiver
    retain(payload) -> 7
    unsent() -> 7, mark_sent(7)  --- frame 7, oldest 5 -->  accept(7, oldest=5): True once, else False
    on_ack(7): 5..7 forgotten    <-- ack 7 --------------   ack_due(now) -> 7, at most once per `ack_interval_s`

- The sender keeps frames until a cumulative ack covers them, in a bounded number. It sends in order, from a cursor, and
  rewinds the cursor to the oldest frame it keeps: after a reset of the connection, when the receiver repeats an ack (it
  saw a gap), or when no ack came for `resend_s` (doubling up to 4 times that while nothing moves).
- `oldest` goes with every frame: what is below was acknowledged or given up and will never come. A receiver that knows
  nothing of the sender (its process is new) starts there. Starting at the first frame seen would lose the frames before
  it, if they were only overtaken during a reconnect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

P = TypeVar("P")

_MAX_BACKOFF: Final = 4


class LinkOverflow(Exception):
    """The receiver has acknowledged too little for too long; the frame was not taken."""


class FrameSender(Generic[P]):
    """The sending end of one numbered link. `first` is the number of its first frame."""

    def __init__(self, *, max_retained: int, resend_s: float, first: int = 1) -> None:
        self._max_retained = max_retained
        self._resend_s = resend_s
        self._retained: deque[P] = deque()
        self._oldest = first
        self._cursor = first
        """The next frame to hand to the channel."""
        self._never_sent = first
        """The first frame that the channel never had; stays where it is when the cursor rewinds."""
        self._progress_at = float("-inf")
        self._rewound_at = float("-inf")
        self._backoff = 1

    @property
    def oldest(self) -> int:
        """Number of the oldest frame that is kept; that of the next one when none is."""
        return self._oldest

    @property
    def next_frame(self) -> int:
        return self._oldest + len(self._retained)

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    def waiting_s(self, now: float) -> float:
        """How long nothing was acknowledged although frames wait for it."""
        return now - self._progress_at if self._retained else 0.0

    def retain(self, payload: P, now: float) -> int:
        """The number of the new frame. Raises LinkOverflow when `max_retained` frames are not acknowledged."""
        if len(self._retained) >= self._max_retained:
            raise LinkOverflow(f"{len(self._retained)} frames are not acknowledged")
        if not self._retained:
            self._progress_at = now
        self._retained.append(payload)
        return self.next_frame - 1

    def unsent(self) -> Iterator[tuple[int, P]]:
        """What to hand to the channel now, in order: `mark_sent` each one that it took, stop at the first refused."""
        while self._cursor < self.next_frame:
            frame = self._cursor
            yield frame, self._retained[frame - self._oldest]
            if self._cursor <= frame:
                return

    def mark_sent(self, frame: int) -> None:
        self._cursor = frame + 1
        self._never_sent = max(self._never_sent, self._cursor)

    def on_ack(self, frame: int, now: float) -> None:
        """Forgets frames up to and including `frame`. A repeated ack means a gap: rewinds, but not time and again."""
        if frame >= self._never_sent:
            return  # never sent: an ack of something else
        if frame >= self._oldest:
            for _ in range(frame - self._oldest + 1):
                self._retained.popleft()
            self._oldest = frame + 1
            self._cursor = max(self._cursor, self._oldest)
            self._progress_at = now
            self._backoff = 1
        elif frame == self._oldest - 1 and now - self._rewound_at >= self._resend_s / 4:
            self._rewind(now)

    def on_reset(self, now: float) -> None:
        """The connection is new: everything that is kept is to be sent again."""
        self._rewind(now)

    def on_tick(self, now: float) -> None:
        """Rewinds when sent frames were not acknowledged in time."""
        since = max(self._progress_at, self._rewound_at)
        if self._cursor > self._oldest and now - since >= self._resend_s * self._backoff:
            self._backoff = min(self._backoff * 2, _MAX_BACKOFF)
            self._rewind(now)

    def _rewind(self, now: float) -> None:
        self._cursor = self._oldest
        self._rewound_at = now


class FrameReceiver:
    """The receiving end of one numbered link."""

    def __init__(self, *, ack_interval_s: float) -> None:
        self._ack_interval_s = ack_interval_s
        self._expected: int | None = None
        self._acked_at = float("-inf")
        self._owes_ack = False
        self.num_skipped = 0
        """Frames that the sender gave up."""

    def accept(self, frame: int, *, oldest: int) -> bool:
        """True when the frame is the next one. False: seen before, or frames before it are missing; drop it."""
        oldest = min(oldest, frame)
        if self._expected is None:
            self._expected = oldest
        if oldest > self._expected:
            self.num_skipped += oldest - self._expected
            self._expected = oldest
        self._owes_ack = True  # also after a duplicate (our ack was lost) and a gap (a repeated ack asks again)
        if frame != self._expected:
            return False
        self._expected += 1
        return True

    def ack_due(self, now: float) -> int | None:
        """The ack to send now, cumulative; it counts as sent. None: nothing to acknowledge, or too soon."""
        deadline = self.next_deadline()
        if deadline is None or self._expected is None or now < deadline:
            return None
        self._owes_ack = False
        self._acked_at = now
        return self._expected - 1

    def next_deadline(self) -> float | None:
        """When `ack_due` will have something."""
        return self._acked_at + self._ack_interval_s if self._owes_ack else None
