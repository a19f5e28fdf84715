"""ZeroMQ on asyncio: an `Inbox` per process, and `Peers`, which finds or makes the `PeerLink` to an endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import structlog

from pdq.wire.codec import Codec
from pdq.wire.nonblocking import DEFAULT_HWM, Reply, Router
from pdq.wire.peer_link import PeerLink
from pdq.wire.pump import Pump

__all__ = ["Inbox", "PeerLink", "Peers", "Reply"]

M = TypeVar("M")

DEFAULT_IDLE_S: Final = 60.0
"""Links unused for this long are closed."""

log = structlog.get_logger(__name__)


class Inbox(Generic[M]):
    """One per process: receives messages and answers them. Binds at once; raises OSError when the port is taken."""

    def __init__(
        self, codec: Codec[M], *, host: str, port: int = 0, advertise_host: str | None = None, hwm: int = DEFAULT_HWM
    ) -> None:
        self._router = Router(codec, host=host, port=port, advertise_host=advertise_host, hwm=hwm)
        self._router.after_send = self._look_again
        self._pump: Pump | None = None
        self._handler: Callable[[M, Reply[M]], None] = _ignore

    @property
    def endpoint(self) -> str:
        """`tcp://host:port` for peers, never a wildcard."""
        return self._router.endpoint

    @property
    def num_undecodable(self) -> int:
        return self._router.num_undecodable

    @property
    def num_dropped(self) -> int:
        """Answers whose peer was gone or took nothing."""
        return self._router.num_dropped

    async def start(self, handler: Callable[[M, Reply[M]], None]) -> None:
        """Hands each message to the handler, which must be quick; what it raises is logged, and the next follows."""
        self._handler = handler
        self._pump = Pump(self._router.socket, self._receive_one)

    async def close(self) -> None:
        if self._pump is not None:
            self._pump.stop()
        self._router.close()

    def _receive_one(self) -> bool:
        received = self._router.receive()
        if received is None:
            return False
        try:
            self._handler(*received)
        except Exception:  # a consume loop: one bad message must not end the process's inbox
            log.exception("handler_failed", kind=type(received[0]).__name__)
        return True

    def _look_again(self) -> None:
        if self._pump is not None:
            self._pump.look_again()


def _ignore(message: object, reply: object) -> None:
    """Before `start` nothing is received."""


class Peers(Generic[M]):
    """Links by endpoint, made on first use, closed when unused for `idle_s`. Made and used in one event loop."""

    def __init__(
        self, codec: Codec[M], *, identity: str, idle_s: float = DEFAULT_IDLE_S, hwm: int = DEFAULT_HWM
    ) -> None:
        self._codec = codec
        self._identity = identity
        self._idle_s = idle_s
        self._hwm = hwm
        self._links: dict[str, PeerLink[M]] = {}
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._sweep = self._loop.call_later(idle_s / 2, self._drop_idle)

    def __len__(self) -> int:
        return len(self._links)

    def link(self, endpoint: str) -> PeerLink[M]:
        """The link to this endpoint; don't keep it, idle ones are closed. Raises OSError when it is no address."""
        link = self._links.get(endpoint)
        if link is None:
            if self._is_closed:
                raise OSError("the links are closed")
            link = PeerLink(self._codec, endpoint, identity=self._identity, hwm=self._hwm)
            self._links[endpoint] = link
        return link

    def send(self, endpoint: str, message: M) -> bool:
        """One way. False: dropped (see PeerLink.send)."""
        return self.link(endpoint).send(message)

    async def request(self, endpoint: str, message: M, *, timeout_s: float, tries: int) -> M:
        """The answer. Raises TimeoutError after `tries` times `timeout_s`."""
        return await self.link(endpoint).request(message, timeout_s=timeout_s, tries=tries)

    async def drop(self, endpoint: str) -> None:
        """Closes the link to a peer that is known to be dead. Requests on it end with TimeoutError."""
        link = self._links.pop(endpoint, None)
        if link is not None:
            await link.close()

    async def close(self) -> None:
        self._is_closed = True
        self._sweep.cancel()
        for endpoint in list(self._links):
            await self.drop(endpoint)

    def _drop_idle(self) -> None:
        oldest = self._loop.time() - self._idle_s
        for endpoint, link in list(self._links.items()):
            if link.is_idle and link.last_used_at < oldest:
                link.shut()
                del self._links[endpoint]
        self._sweep = self._loop.call_later(self._idle_s / 2, self._drop_idle)
