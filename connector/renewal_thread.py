"""The thread that owns the scheduler half's links: renewals, offers and last words, while the engine loop works."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import structlog

from connector.links import SideLinks
from connector.offers import Offers
from connector.renewals import Renewals
from connector.settings import ConnectorSettings
from connector.side_channel import RecvReady, Request
from connector.step import Lost
from connector.transfers import Outcome, TransferKey
from pdq.wire.blocking import BlockingLink, Hub
from pdq.wire.types import KvSource, KvTicket

T = TypeVar("T")
log = structlog.get_logger(__name__)

_MAX_WAIT_S: Final = 0.1
"""A new request needs no wake-up: its first renewal is not due before."""


class RenewalThread:
    """Started with the first request that needs it. All public methods are called by the engine loop's thread."""

    def __init__(
        self, settings: ConnectorSettings, *, consumer: str, tp_size: int, on_progress: Callable[[], None] | None
    ) -> None:
        """`on_progress` is called from this thread when `take_gone` or `take_lost` has something."""
        self._renewals = Renewals(settings, consumer=consumer, tp_size=tp_size)
        self._offers = Offers(settings, consumer=consumer)
        self._settings = settings
        self._consumer = consumer
        self._on_progress = on_progress
        self._hub = Hub()
        self._commands: deque[Callable[[float], None]] = deque()
        self._gone: deque[tuple[str, str]] = deque()
        self._lost: deque[Lost] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-renewals", daemon=True)

    def renew(self, engine_request_id: str, ticket: KvTicket) -> None:
        self._command(lambda now: self._renewals.start(engine_request_id, ticket, now))

    def stop(self, engine_request_id: str) -> None:
        self._command(lambda _now: self._renewals.stop(engine_request_id))

    def say_done(self, ticket: KvTicket, outcome: Outcome, reason: str) -> None:
        self._command(lambda now: self._renewals.say_done(ticket, outcome, reason, now))
        self._hub.wake()

    def offer(self, engine_request_id: str, source: KvSource, ready: RecvReady, *, is_once: bool) -> None:
        self._command(lambda now: self._offers.start(engine_request_id, source, ready, now, is_once=is_once))
        self._hub.wake()

    def withdraw(self, engine_request_id: str) -> None:
        self._command(lambda _now: self._offers.stop(engine_request_id))

    def say_cancel(self, source: KvSource, key: TransferKey, reason: str) -> None:
        self._command(lambda now: self._offers.say_cancel(source, key, reason, now))
        self._hub.wake()

    def take_gone(self) -> dict[str, str]:
        """Pull: what P no longer has."""
        return dict(_drain(self._gone))

    def take_lost(self) -> list[Lost]:
        """Push: what P will not write (all of)."""
        return _drain(self._lost)

    def close(self) -> None:
        """Sends what was said before, without waiting for answers. Idempotent."""
        self._closing = True
        self._hub.wake()
        if self._thread.is_alive():
            self._thread.join()
        self._hub.close()

    def _command(self, command: Callable[[float], None]) -> None:
        self._commands.append(command)
        if not self._closing and not self._thread.is_alive():
            self._thread.start()

    def _run(self) -> None:
        links = SideLinks(self._hub, self._settings, identity=f"{self._consumer}/scheduler")
        try:
            while not self._closing:
                ready = self._hub.wait(self._wait_ms())
                try:
                    self._turn(links, ready)
                except Exception:  # a consume loop
                    log.exception("kv_renewal_turn_failed")
            self._turn(links, ())
        finally:
            links.close()

    def _wait_ms(self) -> int:
        times = [at for at in (self._renewals.next_at(), self._offers.next_at()) if at is not None]
        if not times:
            return int(_MAX_WAIT_S * 1000)
        next_at = min(times)
        return int(min(max(next_at - time.monotonic(), 0.0), _MAX_WAIT_S) * 1000 + 0.999)

    def _turn(self, links: SideLinks, ready: Sequence[object]) -> None:
        now = time.monotonic()
        for socket in ready:
            if isinstance(socket, BlockingLink):
                for answer in links.receive(socket):
                    if not isinstance(answer, Request):
                        self._renewals.on_message(socket.endpoint, answer, now)
                        self._offers.on_message(socket.endpoint, answer, now)
        while self._commands:
            self._commands.popleft()(now)
        for endpoint, message in (*self._renewals.tick(now), *self._offers.tick(now)):
            links.send(endpoint, message, now)
        links.close_idle(now)
        gone = self._renewals.take_gone()
        self._gone.extend(gone.items())
        lost = self._offers.take_lost()
        self._lost.extend(lost)
        if (gone or lost) and self._on_progress is not None:
            self._on_progress()


def _drain(found: deque[T]) -> list[T]:
    drained = []
    with contextlib.suppress(IndexError):
        while True:
            drained.append(found.popleft())
    return drained
