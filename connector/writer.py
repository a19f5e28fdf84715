"""The thread that writes into peers' memory, and that fences on request: one call at a time, in the order asked for.

Neighbouring small writes to one address share a call. A failed call is followed by a fence of this side, so that
nothing reads our blocks any more; what it left under way at the peer is the peer's to fence.
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
from connector.transport import Transport, TransportError

log = structlog.get_logger(__name__)

_QUICK_S = 1.0
"""A call that failed later than this was stalled: to try again would stall all other writes as long again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteEvent:
    """`fenced`: on request; `stuck`: no fence succeeds, the blocks are never safe again."""

    kind: Literal["written", "dropped", "broken", "fenced", "stuck"]
    job_id: int = 0
    push_id: int = 0
    began: float = 0.0
    ended: float = 0.0
    """Monotonic seconds of the call; `written` only."""
    cause: str = ""
    is_stalled: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    job_id: int
    push_id: int
    peer: str
    runs: Runs
    stop: bool = False


class Writer:
    """All methods but the thread's own are called by the IO thread. The thread starts with the first work."""

    def __init__(
        self, transport: Transport, settings: ConnectorSettings, *, name: str, on_event: Callable[[], None]
    ) -> None:
        """`on_event`: called from the writing thread when `take_events` has something."""
        self._transport = transport
        self._settings = settings
        self._on_event = on_event
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._current: list[_Job] = []
        self._is_fence_wanted = False
        self._events: deque[WriteEvent] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, job_id: int, push_id: int, peer: str, runs: Runs) -> None:
        """Ends with `written`, `dropped` or `broken`."""
        with self._changed:
            self._queue.append(_Job(job_id, push_id, peer, runs))
            self._wake()

    def stop(self, push_id: int) -> None:
        """Jobs of the push that have not begun are dropped; the call in flight is not interrupted."""
        with self._changed:
            for job in self._current:
                job.stop = job.stop or job.push_id == push_id
            for job in [job for job in self._queue if job.push_id == push_id]:
                self._queue.remove(job)
                self._say(WriteEvent(kind="dropped", job_id=job.job_id, push_id=push_id))

    def fence(self) -> None:
        """After the call in flight; ends with `fenced` or `stuck`."""
        with self._changed:
            self._is_fence_wanted = True
            self._wake()

    def take_events(self) -> list[WriteEvent]:
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """Ends the thread after the call in flight. Idempotent. Does not close the transport."""
        with self._changed:
            self._closing = True
            self._queue.clear()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _wake(self) -> None:
        if not self._closing and self._thread.ident is None:  # one that has ended has said so
            self._thread.start()
        self._changed.notify()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            if not self._closing:  # nobody writes, or fences, any more
                self._say(WriteEvent(kind="stuck", cause="the writing thread has ended"))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = []
                while not (self._queue or self._is_fence_wanted or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                if is_fence := self._is_fence_wanted:
                    self._is_fence_wanted = False
                else:
                    self._current = self._take()
            if is_fence:
                self._say(WriteEvent(kind="fenced" if self._fence() else "stuck", cause="asked for"))
                continue
            try:
                self._write(self._current)
            except Exception as exc:
                log.exception("kv_write_crashed", peer=self._current[0].peer)
                self._break(self._current, repr(exc), is_stalled=True)

    def _take(self) -> list[_Job]:
        """The next job, and as many after it as fit into one call with it."""
        jobs = [self._queue.popleft()]
        room = self._settings.kv_max_descriptors - len(jobs[0].runs)
        room_bytes = self._settings.kv_batch_bytes - jobs[0].runs.num_bytes
        while self._queue and self._queue[0].peer == jobs[0].peer:
            runs = self._queue[0].runs
            if len(runs) > room or runs.num_bytes > room_bytes:
                break
            room -= len(runs)
            room_bytes -= runs.num_bytes
            jobs.append(self._queue.popleft())
        return jobs

    def _write(self, jobs: list[_Job]) -> None:
        if len(jobs) == 1:
            settings = self._settings
            calls = batches(
                jobs[0].runs, max_descriptors=settings.kv_max_descriptors, max_bytes=settings.kv_batch_bytes
            )
        else:
            joined = Runs()
            for job in jobs:
                joined.local += job.runs.local
                joined.remote += job.runs.remote
                joined.lengths += job.runs.lengths
            calls = [joined]
        first_began = time.monotonic()
        for call in calls:
            if len(jobs) == 1 and jobs[0].stop:
                self._say(WriteEvent(kind="dropped", job_id=jobs[0].job_id, push_id=jobs[0].push_id))
                return
            began = time.monotonic()
            try:
                self._transport.write(jobs[0].peer, call.local, call.remote, call.lengths)
            except TransportError as exc:
                self._break(jobs, str(exc), is_stalled=time.monotonic() - began > _QUICK_S)
                return
        ended = time.monotonic()
        for job in jobs:
            self._events.append(
                WriteEvent(kind="written", job_id=job.job_id, push_id=job.push_id, began=first_began, ended=ended)
            )
        self._on_event()

    def _break(self, jobs: list[_Job], cause: str, *, is_stalled: bool) -> None:
        if not self._fence():
            self._say(WriteEvent(kind="stuck", cause=cause))
            return
        for job in jobs:
            self._say(
                WriteEvent(kind="broken", job_id=job.job_id, push_id=job.push_id, cause=cause, is_stalled=is_stalled)
            )

    def _fence(self) -> bool:
        return fence(
            self._transport,
            limit_s=self._settings.kv_quarantine_s,
            changed=self._changed,
            is_closing=lambda: self._closing,
        )

    def _say(self, event: WriteEvent) -> None:
        self._events.append(event)
        self._on_event()
