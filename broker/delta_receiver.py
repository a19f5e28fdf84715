"""The gateway's end of the links that carry token deltas: hands out each frame once and in order. See `deltas.py`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from broker.deltas import DeltaSettings
from broker.messages import Deltas, DeltasAck
from broker.notices import NoticeReply
from pdq.wire.link import FrameReceiver

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPulse:
    """When a worker last moved, in the event loop's time (`asyncio.get_running_loop().time()`)."""

    last_frame_at: float
    step: int
    step_changed_at: float


class DeltaReceiver:
    """The gateway's end of all links. Made and used in one event loop."""

    def __init__(self, settings: DeltaSettings) -> None:
        self._settings = settings
        self._links: dict[str, _Incoming] = {}

    def feed(self, deltas: Deltas, reply: NoticeReply) -> bool:
        """True: take this frame over; each once, in order. False: it is a repeat, or comes too early."""
        link = self._links.get(deltas.worker)
        if link is None:
            link = self._links[deltas.worker] = _Incoming(deltas.worker, self._settings)
        return link.feed(deltas, reply)

    def pulse(self, worker: str) -> WorkerPulse | None:
        """None: nothing came from this worker yet."""
        link = self._links.get(worker)
        return None if link is None else link.pulse

    def __len__(self) -> int:
        """Workers with a link."""
        return len(self._links)

    def forget_silent(self, silence_s: float) -> None:
        """As `forget`, for all that sent nothing for so long."""
        oldest = asyncio.get_running_loop().time() - silence_s
        for worker in [worker for worker, link in self._links.items() if link.pulse.last_frame_at < oldest]:
            self.forget(worker)

    def forget(self, worker: str) -> None:
        """For workers that are gone. Should it speak again, its unacknowledged frames are accepted once more."""
        link = self._links.pop(worker, None)
        if link is not None:
            link.close()

    async def close(self) -> None:
        for worker in list(self._links):
            self.forget(worker)


class _Incoming:
    """One numbered link from one worker process."""

    def __init__(self, worker: str, settings: DeltaSettings) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReceiver(ack_interval_s=settings.delta_ack_s)
        self._timer: asyncio.TimerHandle | None = None
        self._reply: NoticeReply | None = None
        now = self._loop.time()
        self.pulse = WorkerPulse(last_frame_at=now, step=-1, step_changed_at=now)

    def feed(self, deltas: Deltas, reply: NoticeReply) -> bool:
        now = self._loop.time()
        has_moved = deltas.step > self.pulse.step
        self.pulse = WorkerPulse(
            last_frame_at=now,
            step=deltas.step if has_moved else self.pulse.step,
            step_changed_at=now if has_moved else self.pulse.step_changed_at,
        )
        self._reply = reply
        num_skipped = self._frames.num_skipped
        is_accepted = self._frames.accept(deltas.frame, oldest=deltas.oldest)
        if self._frames.num_skipped > num_skipped:
            log.warning("delta_frames_skipped", worker=self._worker, total=self._frames.num_skipped)
        self._acknowledge()
        return is_accepted

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _acknowledge(self) -> None:
        """Now, or by the timer, so that acks are at least `delta_ack_s` apart."""
        ack = self._frames.ack_due(self._loop.time())
        if ack is not None and self._reply is not None:
            self._reply(DeltasAck(worker=self._worker, frame=ack))
        deadline = self._frames.next_deadline()
        if deadline is not None and self._timer is None:
            self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._acknowledge()
