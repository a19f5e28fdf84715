"""A connection to one peer's inbox: one-way messages, requests that repeat, and word of lost connections.

Life of a link: connecting (messages queue) -> connected <-> lost. When a connection is lost, the socket is replaced:
what was queued for the old connection is dropped, never delivered late to whoever listens there next. Requests repeat
by themselves; `on_reset` tells the owner of a numbered link to replay. While it is lost, `send` says False.

A connection may be half open: the other end, or something in between, has lost it and nobody says so. What is sent goes
nowhere until ZeroMQ's heartbeat gives up, after many seconds. So who waits in vain for an answer calls `renew`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from pdq.wire.codec import Codec
from pdq.wire.nonblocking import DEFAULT_HWM, LINGER_MS, Dealer
from pdq.wire.pump import Pump

M = TypeVar("M")
_REOPEN_S = 1.0
"""Until the next try, when the process has no descriptor left."""

log = structlog.get_logger(__name__)


class PeerLink(Generic[M]):
    """A connection to one peer's inbox, made and used in one event loop.

    `on_message` gets what the peer sends without being asked (ref 0). `on_reset` is called with False when an
    established connection is lost, with True when it is there again (not for the first connection).
    """

    def __init__(
        self,
        codec: Codec[M],
        endpoint: str,
        *,
        identity: str,
        on_message: Callable[[M], None] | None = None,
        on_reset: Callable[[bool], None] | None = None,
        hwm: int = DEFAULT_HWM,
    ) -> None:
        self.endpoint = endpoint
        self._codec = codec
        self._identity = identity
        self._on_message = on_message
        self._on_reset = on_reset
        self._hwm = hwm
        self._loop = asyncio.get_running_loop()
        self._refs = itertools.count(1)
        self._requests: dict[int, _Request[M]] = {}
        self._is_lost = False
        self._is_closed = False
        self.is_connected = False
        self.num_dropped = 0
        """Messages that could not be sent."""
        self.last_used_at = self._heard_at = self._loop.time()
        self._open()

    @property
    def is_idle(self) -> bool:
        """No request waits for its answer."""
        return not self._requests

    def send(self, message: M) -> bool:
        """One way. False: the queue is full, the connection is lost, or the link is closed; the message is dropped."""
        return self._transmit(self._codec.encode(message))

    async def request(self, message: M, *, timeout_s: float, tries: int) -> M:
        """The answer. Repeats the message with the same ref after each `timeout_s`, and after a reconnect.

        Raises TimeoutError after `tries` times `timeout_s`, or when the link is closed. Late answers are dropped.
        """
        what = f"{type(message).__name__} to {self.endpoint}"
        if self._is_closed:
            raise TimeoutError(f"{what}: the link is closed")
        ref = next(self._refs)
        waiting = _Request(self, self._codec.encode(message, ref=ref), what, timeout_s=timeout_s, tries=tries)
        self._requests[ref] = waiting
        try:
            return await waiting.answer
        finally:
            waiting.timer.cancel()
            del self._requests[ref]

    def renew(self, silent_since: float) -> None:
        """Connects anew, as after a loss, if nothing was heard since then (the loop's time)."""
        if self.is_connected and self._heard_at <= silent_since:
            log.info("link_silent", peer=self.endpoint, seconds=round(self._loop.time() - silent_since, 3))
            self._lost()

    async def close(self) -> None:
        """Ends waiting requests with TimeoutError. What is queued still has LINGER_MS to get out."""
        self.shut()

    def shut(self) -> None:
        """`close` for callers that are not coroutines."""
        if self._is_closed:
            return
        self._is_closed = True
        self.is_connected = False
        for waiting in self._requests.values():
            waiting.fail("the link was closed")
        self._close_socket(linger_ms=LINGER_MS)

    def _open(self) -> None:
        self._dealer = Dealer(self._codec, self.endpoint, identity=self._identity, hwm=self._hwm)
        self._monitor = self._dealer.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._pump = Pump(self._dealer.socket, self._receive_one)
        self._monitor_pump = Pump(self._monitor, self._observe_one)
        try:
            self._dealer.connect()
        except OSError:
            self._close_socket(linger_ms=0)
            raise

    def _close_socket(self, *, linger_ms: int) -> None:
        if self._dealer.socket.closed:
            return  # while it could not be opened again
        self._monitor_pump.stop()
        self._pump.stop()
        self._dealer.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger_ms=linger_ms)

    def _transmit(self, data: bytes) -> bool:
        self.last_used_at = self._loop.time()
        if self._is_closed or self._is_lost:
            self.num_dropped += 1
            return False
        is_sent = self._dealer.send(data)
        self._pump.look_again()
        self.num_dropped += not is_sent
        return is_sent

    def _receive_one(self) -> bool:
        received = self._dealer.receive()
        if received is None:
            return False
        self.last_used_at = self._heard_at = self._loop.time()
        message, ref = received
        if ref:
            waiting = self._requests.get(ref)
            if waiting is not None and not waiting.answer.done():
                waiting.answer.set_result(message)
        elif self._on_message is not None:
            try:
                self._on_message(message)
            except Exception:  # a consume loop
                log.exception("handler_failed", kind=type(message).__name__)
        return True

    def _observe_one(self) -> bool:
        try:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
        except zmq.Again:
            return False
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected()
        elif event == zmq.EVENT_DISCONNECTED and self.is_connected:
            self._lost()
        return True

    def _connected(self) -> None:
        was_lost, self._is_lost, self.is_connected = self._is_lost, False, True
        self._heard_at = self._loop.time()
        if was_lost:
            log.info("link_restored", peer=self.endpoint)
            for waiting in list(self._requests.values()):
                self._transmit(waiting.data)
            self._report_reset(True)

    def _lost(self) -> None:
        log.info("link_lost", peer=self.endpoint)
        while self._receive_one():
            pass  # answers that came before the end
        if self._is_closed:
            return
        self._is_lost, self.is_connected = True, False
        self._close_socket(linger_ms=0)
        self._reopen()
        self._report_reset(False)

    def _reopen(self) -> None:
        if self._is_closed:
            return
        try:
            self._open()
        except OSError as error:
            log.warning("link_not_reopened", peer=self.endpoint, error=str(error))
            self._loop.call_later(_REOPEN_S, self._reopen)

    def _report_reset(self, is_connected: bool) -> None:
        if self._on_reset is not None:
            try:
                self._on_reset(is_connected)
            except Exception:  # a consume loop
                log.exception("handler_failed", kind="reset")


class _Request(Generic[M]):
    """A message that waits for its answer, and repeats itself."""

    def __init__(self, link: PeerLink[M], data: bytes, what: str, *, timeout_s: float, tries: int) -> None:
        self.data = data
        self._link = link
        self._what = what
        self._timeout_s = timeout_s
        self._tries_left = max(tries, 1)
        self._loop = asyncio.get_running_loop()
        self._asked_at = self._loop.time()
        self.answer: asyncio.Future[M] = self._loop.create_future()
        self._try()

    def _try(self) -> None:
        if self._tries_left <= 0:
            self.fail("no answer")
            self._link.renew(self._asked_at)
            return
        self._tries_left -= 1
        self.timer = self._loop.call_later(self._timeout_s, self._try)
        self._link._transmit(self.data)

    def fail(self, why: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(TimeoutError(f"{self._what}: {why}"))
