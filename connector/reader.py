"""The thread that owns the transport: one call at a time, in the order asked for. Reads are its only work for now.

A failed call is not repeated before a fence: what it left under way could land after the block was used again.
    call fails at once -> fence -> peer answers a probe? -> the same call once more
    fails again, or stalled, or the peer is dead -> broken -> fence -> fenced
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog

from connector.fencing import fence
from connector.layout import Runs, batches
from connector.settings import ConnectorSettings
from connector.transport import PendingRead, Transport, TransportError

log = structlog.get_logger(__name__)

_NAP_S = 0.001
_QUICK_S = 1.0
"""A call that failed later than this was stalled: repeating it would stall all other reads as long again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEvent:
    """`broken` is followed by `fenced`, or by `stuck` when no fence succeeds: the blocks are never safe again."""

    leg_id: int
    kind: Literal["read", "drained", "broken", "fenced", "stuck"]
    cause: str = ""
    is_peer_lost: bool = False
    """Of `broken`: the peer is dead or stands still."""


@dataclass(slots=True, eq=False)
class _Job:
    leg_id: int
    peer: str
    runs: Runs
    pending: PendingRead | None = None
    """Begun already, by the IO thread, at `began` and in this generation of the transport."""
    began: float = 0.0
    generation: int = 0
    stop: bool = False
    is_peer_lost: bool = False
    is_stuck: bool = False
    """A fence was tried for as long as is allowed."""


class Reader:
    """All methods but the thread's own are called by the IO thread."""

    def __init__(
        self, transport: Transport, settings: ConnectorSettings, *, name: str, on_event: Callable[[], None]
    ) -> None:
        """`on_event`: called from the reading thread when `take_events` has something."""
        self._transport = transport
        self._settings = settings
        self._on_event = on_event
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._current: _Job | None = None
        self._events: deque[ReadEvent] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """The transport is free; stays so until the next `submit`."""
        with self._changed:
            return self._current is None and not self._queue

    def submit(
        self,
        leg_id: int,
        peer: str,
        runs: Runs,
        *,
        pending: PendingRead | None = None,
        began: float = 0.0,
        stop: bool = False,
    ) -> None:
        """`pending`: the whole read, begun at `began` and not over yet; nothing else may use the transport now."""
        with self._changed:
            self._queue.append(_Job(leg_id, peer, runs, pending, began, self._transport.generation, stop))
            self._changed.notify()

    def stop(self, leg_id: int) -> None:
        """`drained` (or how it ended) follows: at once when it had not begun, else after the call in flight."""
        with self._changed:
            if self._current is not None and self._current.leg_id == leg_id:
                self._current.stop = True
                return
            for job in self._queue:
                if job.leg_id == leg_id and job.pending is not None:
                    job.stop = True
                    return
                if job.leg_id == leg_id:
                    self._queue.remove(job)
                    self._events.append(ReadEvent(leg_id=leg_id, kind="drained"))
                    self._on_event()
                    return

    def take_events(self) -> list[ReadEvent]:
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Ends the thread after the call in flight, then closes the transport, which ends those begun. Idempotent."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            if self._current is not None:
                self._current.stop = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._transport.close()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            if not self._closing:  # nobody reads, or fences, any more
                self._events.append(ReadEvent(leg_id=0, kind="stuck", cause="the reading thread has ended"))
                self._on_event()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = None
                while not self._queue and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                job = self._current = self._queue.popleft()
            try:
                self._read(job)
            except Exception as exc:
                log.exception("kv_read_crashed", peer=job.peer)
                self._say(job, "broken", repr(exc))
                self._say(job, "fenced" if self._fence(job) else "stuck", repr(exc))

    def _read(self, job: _Job) -> None:
        calls = batches(
            job.runs, max_descriptors=self._settings.kv_max_descriptors, max_bytes=self._settings.kv_batch_bytes
        )
        for call in calls:
            if job.stop and job.pending is None:
                self._say(job, "drained")
                return
            cause = self._call(job, call)
            if cause is not None:
                self._say(job, "broken", cause, is_peer_lost=job.is_peer_lost)
                self._say(job, "fenced" if not job.is_stuck and self._fence(job) else "stuck", cause)
                return
        self._say(job, "read")

    def _call(self, job: _Job, call: Runs) -> str | None:
        """None: the bytes are here. Else the cause; a fence is needed."""
        pending, job.pending = job.pending, None
        began = time.monotonic()
        try:
            if pending is not None and job.generation == self._transport.generation:
                began = job.began
                while not pending.is_done():
                    time.sleep(_NAP_S)
            elif not job.stop:
                self._transport.read(job.peer, call.local, call.remote, call.lengths)
            return None
        except TransportError as exc:
            cause = str(exc)
        if time.monotonic() - began > _QUICK_S:
            job.is_peer_lost = True
            return f"{cause}, stalled"
        if job.stop:
            return cause
        if not self._fence(job):
            job.is_stuck = True
            return cause
        if not self._transport.probe(job.peer):
            job.is_peer_lost = True
            return f"{cause}; {job.peer} is dead"
        log.warning("kv_read_repeated", peer=job.peer, cause=cause)
        try:
            self._transport.read(job.peer, call.local, call.remote, call.lengths)
            return None
        except TransportError as exc:
            return f"{exc}; also after a fence"

    def _fence(self, job: _Job) -> bool:
        return fence(
            self._transport,
            limit_s=self._settings.kv_quarantine_s,
            changed=self._changed,
            is_closing=lambda: self._closing,
            peer=job.peer,
        )

    def _say(
        self,
        job: _Job,
        kind: Literal["read", "drained", "broken", "fenced", "stuck"],
        cause: str = "",
        *,
        is_peer_lost: bool = False,
    ) -> None:
        self._events.append(ReadEvent(leg_id=job.leg_id, kind=kind, cause=cause, is_peer_lost=is_peer_lost))
        self._on_event()
