"""Token deltas from D to gateways: one numbered link per (D process, gateway process), nothing lost, nothing doubled.

D's end keeps each frame until the gateway acknowledged it, and repeats it after a gap, a reconnect, or long silence.
The gateway's end (`delta_receiver.py`) hands out each frame once and in order. A gateway that restarts at the same
address is a new receiver: it starts at the oldest frame that D still keeps, and knows none of the requests in it.

Once a second a frame also lists the requests that D has open for this gateway: a sign of life, and the way in which the
gateway finds out about one that D has forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import structlog

from broker.messages import Delta, Deltas, DeltasAck, Notice
from broker.notices import NOTICES
from pdq.wire.link import FrameSender, LinkOverflow
from pdq.wire.sockets import PeerLink

_SILENT_RESENDS: Final = 2
"""Frames that were sent so often without an acknowledgement need another connection."""
_MAX_CLOSED: Final = 4096
"""Closed links whose numbering is remembered: gateways come and go with their addresses."""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSettings:
    """The links that carry tokens."""

    max_unacknowledged_frames: int = field(
        default=4096, metadata={"help": "frames kept for one gateway; beyond it its requests fail"}
    )
    delta_give_up_s: float = field(
        default=30.0, metadata={"help": "a gateway that acknowledges nothing for this long is given up"}
    )
    delta_resend_s: float = field(default=1.0, metadata={"help": "repeat frames not acknowledged for this long"})
    delta_ack_s: float = field(default=0.1, metadata={"help": "shortest time between two acknowledgements"})
    sign_of_life_s: float = field(default=1.0, metadata={"help": "an idle link sends an empty frame this often"})
    delta_link_idle_s: float = field(
        default=600.0, metadata={"help": "close a link that carried no token for this long"}
    )


class DeltaSender:
    """D's end of all its links. Made and used in one event loop.

    `on_overflow(gateway)`: this gateway acknowledges nothing; all that was kept for it is dropped, so the caller fails
    every request of that gateway. A later push to it starts afresh.
    """

    def __init__(
        self,
        settings: DeltaSettings,
        *,
        worker_id: str,
        on_overflow: Callable[[str], None],
        owes: Callable[[str], tuple[str, ...]] | None = None,
        on_repeat: Callable[[], None] = lambda: None,
    ) -> None:
        """`owes(gateway)`: ids of all requests that are open for it; None: it is not told.

        `on_repeat` hears of each frame that is sent once more.
        """
        self._settings = settings
        self._worker_id = worker_id
        self._on_overflow = on_overflow
        self._owes = owes
        self._on_repeat = on_repeat
        self._links: dict[str, _Outgoing] = {}
        self._next_frames: dict[str, int] = {}
        """Of closed links: numbering goes on, so that a receiver never takes a new frame for an old one."""
        self._loop = asyncio.get_running_loop()
        self._tick_s = min(settings.delta_resend_s, settings.sign_of_life_s) / 4
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self.step = 0
        """Engine step counter. Set it at steps without news too: idle frames tell it to all gateways."""

    def __len__(self) -> int:
        """Gateways with an open link."""
        return len(self._links)

    def next_frame(self, gateway: str) -> int:
        """Number of the next frame to this gateway: it will know of all that is open now."""
        link = self._links.get(gateway)
        return self._next_frames.get(gateway, 1) if link is None else link.frames.next_frame

    def open(self, gateway: str) -> None:
        """Signs of life begin, if they haven't. May call `on_overflow`."""
        if gateway not in self._links:
            self.push(gateway, self.step, ())

    def push(self, gateway: str, step: int, items: tuple[Delta, ...]) -> None:
        """Sends the deltas to this gateway endpoint now, or as soon as it takes them. May call `on_overflow`."""
        self.step = max(self.step, step)
        try:
            link = self._links.get(gateway)
            if link is None:
                link = _Outgoing(
                    self._settings,
                    gateway,
                    self._worker_id,
                    first=self._next_frames.get(gateway, 1),
                    on_repeat=self._on_repeat,
                )
                self._links[gateway] = link
        except OSError:
            self._give_up(gateway, "no_address")
            return
        if not link.push(step, items):
            self._give_up(gateway, "too_many_frames")

    def num_unacknowledged(self, gateway: str) -> int:
        link = self._links.get(gateway)
        return 0 if link is None else link.frames.num_retained

    def drop(self, gateway: str) -> None:
        """Forgets a gateway that is known to be gone, with all that was kept for it. No callback."""
        link = self._links.pop(gateway, None)
        if link is not None:
            self._next_frames.pop(gateway, None)  # to the end of the order
            self._next_frames[gateway] = link.frames.next_frame
            if len(self._next_frames) > _MAX_CLOSED:
                del self._next_frames[next(iter(self._next_frames))]
            link.close()

    async def close(self) -> None:
        """Closes all links; what is not acknowledged by now may be lost (see `drained`)."""
        self._timer.cancel()
        for gateway in list(self._links):
            self.drop(gateway)

    async def drained(self, timeout_s: float) -> bool:
        """Waits until every frame is acknowledged. False when time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                for link in list(self._links.values()):
                    await link.drained.wait()
        except TimeoutError:
            return False
        return True

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        for gateway, link in list(self._links.items()):
            owes = None if self._owes is None else self._owes(gateway)
            silent_s, tokenless_s = link.tick(self.step, owes)
            if silent_s > self._settings.delta_give_up_s:
                self._give_up(gateway, "no_acknowledgement")
            elif not owes and tokenless_s > self._settings.delta_link_idle_s and link.frames.num_retained == 0:
                self.drop(gateway)

    def _give_up(self, gateway: str, reason: str) -> None:
        log.warning("gateway_given_up", gateway=gateway, reason=reason, num_frames=self.num_unacknowledged(gateway))
        self.drop(gateway)
        self._on_overflow(gateway)


_Frame = tuple[int, tuple[Delta, ...], tuple[str, ...] | None]
"""Step, deltas, and what is open when the frame is a sign of life."""


class _Outgoing:
    """One numbered link to one gateway."""

    def __init__(
        self, settings: DeltaSettings, gateway: str, worker_id: str, *, first: int, on_repeat: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._loop = asyncio.get_running_loop()
        self._listed_at = self._tokens_at = self._loop.time()
        self._last_list = 0
        """Number of the newest frame that is a sign of life."""
        self.frames: FrameSender[_Frame] = FrameSender(
            max_retained=settings.max_unacknowledged_frames, resend_s=settings.delta_resend_s, first=first
        )
        self._on_repeat = on_repeat
        self._newest_sent = first - 1
        self.drained = asyncio.Event()
        self.drained.set()
        self._link = PeerLink(
            NOTICES, gateway, identity=worker_id, on_message=self._on_message, on_reset=self._on_reset
        )

    def push(self, step: int, items: tuple[Delta, ...], owes: tuple[str, ...] | None = None) -> bool:
        """False: too much is unacknowledged."""
        now = self._loop.time()
        try:
            self.frames.retain((step, items, owes), now)
        except LinkOverflow:
            return False
        self.drained.clear()
        if items:
            self._tokens_at = now
        self._flush()
        return True

    def tick(self, step: int, owes: tuple[str, ...] | None) -> tuple[float, float]:
        """Repeats, or gives a sign of life. Seconds without the acknowledgement that is due, and without tokens."""
        now = self._loop.time()
        self.frames.on_tick(now)
        self._flush()
        silent_s = _SILENT_RESENDS * self._settings.delta_resend_s
        if self.frames.waiting_s(now) > silent_s:
            self._link.renew(now - silent_s)
        is_last_acknowledged = self._last_list < self.frames.oldest
        if is_last_acknowledged and now - self._listed_at >= self._settings.sign_of_life_s:
            self._listed_at, self._last_list = now, self.frames.next_frame
            self.push(step, (), owes)
        return self.frames.waiting_s(now), now - self._tokens_at

    def close(self) -> None:
        self.drained.set()
        self._link.shut()

    def _flush(self) -> None:
        for frame, (step, items, owes) in self.frames.unsent():
            message = Deltas(
                worker=self._worker_id, frame=frame, oldest=self.frames.oldest, step=step, items=items, owes=owes
            )
            if not self._link.send(message):
                return
            self.frames.mark_sent(frame)
            if frame <= self._newest_sent:
                self._on_repeat()
            self._newest_sent = max(self._newest_sent, frame)

    def _on_message(self, notice: Notice) -> None:
        if isinstance(notice, DeltasAck) and notice.worker == self._worker_id:
            self.frames.on_ack(notice.frame, self._loop.time())
            if self.frames.num_retained == 0:
                self.drained.set()
            self._flush()

    def _on_reset(self, is_connected: bool) -> None:
        if is_connected:
            self.frames.on_reset(self._loop.time())
            self._flush()
