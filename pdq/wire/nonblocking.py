"""ROUTER and DEALER sockets that never block: the part that the asyncio and the threaded sockets share.

Frames: ROUTER [identity, message], DEALER [message]; one message is one `Codec` envelope.

- Sending returns False instead of waiting (high-water mark reached) or failing (the peer is gone). Drops are counted.
- What doesn't decode is logged, counted and answered with nothing.
- A socket belongs to the thread that made it. Make it after a fork, never before.

CURVE keys, once wanted, are set in `_open`, before bind or connect.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable
from typing import Final, Generic, TypeVar

import structlog
import zmq

from pdq.wire.codec import Codec, DecodeError
from pdq.wire.endpoints import advertised_host, bind_address, needs_ipv6, tcp_endpoint

M = TypeVar("M")

DEFAULT_HWM: Final = 1000
"""Messages queued per peer and direction before sending returns False."""
LINGER_MS: Final = 500
"""How long a closed socket may go on sending what it has queued."""
MAX_MESSAGE_BYTES: Final = 256 * 2**20
_MAX_SOCKETS: Final = 8192
_HEARTBEAT_INTERVAL_MS: Final = 2000
_HEARTBEAT_TIMEOUT_MS: Final = 10_000
"""A silent connection (host gone, process stopped) is closed after this; TCP alone would take minutes."""
_RECONNECT_FIRST_MS: Final = 20
_RECONNECT_MAX_MS: Final = 1000

log = structlog.get_logger(__name__)


class Reply(Generic[M]):
    """The way back to the sender of one message: call it in the inbox's own thread, now or later, more than once."""

    __slots__ = ("_ref", "_router", "peer")

    def __init__(self, router: Router[M], peer: bytes, ref: int) -> None:
        self._router = router
        self._ref = ref
        self.peer = peer
        """ZeroMQ identity of the sender's socket."""

    def __call__(self, answer: M) -> bool:
        """Sends the answer with the message's ref. False: the peer is gone or takes nothing."""
        return self._router.send(self.peer, answer, ref=self._ref)


class Router(Generic[M]):
    """A bound ROUTER. Raises OSError, with the address, when the port can't be bound."""

    def __init__(self, codec: Codec[M], *, host: str, port: int, advertise_host: str | None, hwm: int) -> None:
        self._codec = codec
        told = "" if host.startswith("ipc://") else advertised_host(host, advertise_host)
        address = host if host.startswith("ipc://") else tcp_endpoint(bind_address(host), port)
        self.socket = _open(zmq.ROUTER, hwm=hwm, ipv6=needs_ipv6(address))
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as exc:
            self.socket.close(linger=0)
            raise OSError(exc.errno, f"can't listen on {address}: {exc.strerror}; free it or choose another") from exc
        self.endpoint = host if not told else tcp_endpoint(told, _bound_port(self.socket))
        """Where others connect to."""
        self.after_send: Callable[[], None] = _nothing
        """Called after each send, also a failed one: it may have swallowed the announcement of a received message."""
        self.num_undecodable = 0
        self.num_dropped = 0
        """Answers that could not be sent."""

    def receive(self) -> tuple[M, Reply[M]] | None:
        """The next message that decodes; None when nothing is there."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                if len(frames) != 2:
                    raise DecodeError(f"{len(frames)} frames, expected identity and message")
                message, ref = self._codec.decode(frames[1])
                return message, Reply(self, frames[0], ref)
            except DecodeError as exc:
                self.num_undecodable += 1
                log.warning(
                    "message_undecodable", peer=repr(frames[0]), num_bytes=sum(map(len, frames)), error=str(exc)
                )

    def send(self, peer: bytes, message: M, *, ref: int) -> bool:
        """False: that peer is not connected, or its queue is full."""
        if not self.socket.closed:
            try:
                self.socket.send_multipart([peer, self._codec.encode(message, ref=ref)], zmq.NOBLOCK)
                return True
            except zmq.ZMQError as exc:
                if exc.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                    raise
            finally:
                self.after_send()
        self.num_dropped += 1
        return False

    def close(self) -> None:
        self.socket.close(linger=LINGER_MS)


class Dealer(Generic[M]):
    """A DEALER that connects, and reconnects, to one endpoint."""

    def __init__(self, codec: Codec[M], endpoint: str, *, identity: str, hwm: int) -> None:
        self._codec = codec
        self.endpoint = endpoint
        self.socket = _open(zmq.DEALER, hwm=hwm, ipv6=needs_ipv6(endpoint))
        self.socket.setsockopt_string(zmq.IDENTITY, f"{identity[:200]}/{secrets.token_hex(4)}")
        self.num_undecodable = 0
        self.num_dropped = 0
        """Messages that could not be sent."""

    def connect(self) -> None:
        """Starts connecting in the background. Raises OSError when the endpoint is no address."""
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as exc:
            raise OSError(exc.errno, f"can't connect to {self.endpoint}: {exc.strerror}") from exc

    def receive(self) -> tuple[M, int] | None:
        """The next message that decodes, with its ref; None when nothing is there."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                if len(frames) != 1:
                    raise DecodeError(f"{len(frames)} frames, expected one")
                return self._codec.decode(frames[0])
            except DecodeError as exc:
                self.num_undecodable += 1
                log.warning("message_undecodable", peer=self.endpoint, num_bytes=sum(map(len, frames)), error=str(exc))

    def send(self, data: bytes) -> bool:
        """Sends an encoded message. False: the queue to this peer is full, or the socket is closed."""
        if not self.socket.closed:
            try:
                self.socket.send(data, zmq.NOBLOCK)
                return True
            except zmq.Again:
                pass
        self.num_dropped += 1
        return False

    def close(self, *, linger_ms: int = LINGER_MS) -> None:
        self.socket.close(linger=linger_ms)


def _nothing() -> None:
    """The default of `Router.after_send`."""


def _open(kind: int, *, hwm: int, ipv6: bool) -> zmq.Socket[bytes]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as exc:
        raise OSError(exc.errno, f"no socket for messages: {exc.strerror}; raise the limit of open files") from exc
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, int(ipv6))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_FIRST_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    return socket


def _bound_port(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2].rstrip("\0"))
