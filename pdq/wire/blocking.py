"""ZeroMQ for threads without an event loop: `BlockingInbox`, `BlockingLink`, and a `Hub` to wait on several of them.

    hub = Hub()
    hub.add(inbox)
    while running:
        ready = hub.wait(timeout_ms)      # returns early after hub.wake() from any thread
        if inbox in ready:
            for message, reply in inbox.receive(): ...

All but `Hub.wake` belongs to one thread. Nothing blocks but `wait`, `poll` and `request`. A BlockingLink does not tell
of lost connections: its owner repeats what was not answered in time, with the same ref.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Final, Generic, Protocol, TypeVar

import zmq

from pdq.wire.codec import Codec
from pdq.wire.nonblocking import DEFAULT_HWM, Dealer, Reply, Router

M = TypeVar("M")

_MAX_PER_CALL: Final = 1000
"""Messages that one `receive` returns; the rest comes with the next call."""


class Waitable(Protocol):
    """What a Hub can wait on."""

    @property
    def zmq_socket(self) -> zmq.Socket[bytes]: ...


class BlockingInbox(Generic[M]):
    """A ROUTER. `host` may be an `ipc://path` instead. Raises OSError when the port is taken."""

    def __init__(
        self, codec: Codec[M], *, host: str, port: int = 0, advertise_host: str | None = None, hwm: int = DEFAULT_HWM
    ) -> None:
        self._router = Router(codec, host=host, port=port, advertise_host=advertise_host, hwm=hwm)

    @property
    def endpoint(self) -> str:
        return self._router.endpoint

    @property
    def zmq_socket(self) -> zmq.Socket[bytes]:
        return self._router.socket

    @property
    def num_undecodable(self) -> int:
        return self._router.num_undecodable

    @property
    def num_dropped(self) -> int:
        return self._router.num_dropped

    def receive(self) -> list[tuple[M, Reply[M]]]:
        """What is there now; the Reply can be kept and called later, any number of times, in this thread."""
        received: list[tuple[M, Reply[M]]] = []
        while len(received) < _MAX_PER_CALL and (item := self._router.receive()) is not None:
            received.append(item)
        return received

    def poll(self, timeout_ms: int) -> list[tuple[M, Reply[M]]]:
        """`receive`, after waiting for something to come."""
        self._router.socket.poll(timeout_ms)
        return self.receive()

    def close(self) -> None:
        self._router.close()


class BlockingLink(Generic[M]):
    """A DEALER to one endpoint; connects in the background. Raises OSError when the endpoint is no address."""

    def __init__(self, codec: Codec[M], endpoint: str, *, identity: str, hwm: int = DEFAULT_HWM) -> None:
        self._codec = codec
        self._dealer = Dealer(codec, endpoint, identity=identity, hwm=hwm)
        try:
            self._dealer.connect()
        except OSError:
            self._dealer.close(linger_ms=0)
            raise

    @property
    def endpoint(self) -> str:
        return self._dealer.endpoint

    @property
    def zmq_socket(self) -> zmq.Socket[bytes]:
        return self._dealer.socket

    @property
    def num_undecodable(self) -> int:
        return self._dealer.num_undecodable

    @property
    def num_dropped(self) -> int:
        return self._dealer.num_dropped

    def send(self, message: M, *, ref: int = 0) -> bool:
        """False: the queue to this peer is full; the message is dropped. The answer will carry `ref`."""
        return self._dealer.send(self._codec.encode(message, ref=ref))

    def receive(self) -> list[tuple[M, int]]:
        """What is there now, each with the ref of the message that it answers."""
        received: list[tuple[M, int]] = []
        while len(received) < _MAX_PER_CALL and (item := self._dealer.receive()) is not None:
            received.append(item)
        return received

    def poll(self, timeout_ms: int) -> list[tuple[M, int]]:
        """`receive`, after waiting for something to come."""
        self._dealer.socket.poll(timeout_ms)
        return self.receive()

    def request(self, message: M, *, ref: int, timeout_s: float, tries: int) -> M:
        """Sends, waits for the answer with this ref (other messages are dropped) and repeats. Raises TimeoutError."""
        for _ in range(max(tries, 1)):
            self.send(message, ref=ref)
            deadline = time.monotonic() + timeout_s
            while (left_s := deadline - time.monotonic()) > 0:
                for answer, answered in self.poll(max(1, int(left_s * 1000))):
                    if answered == ref:
                        return answer
        raise TimeoutError(f"{type(message).__name__} to {self.endpoint}: no answer")

    def close(self) -> None:
        self._dealer.close()


class Hub:
    """Waits until one of several sockets has something to receive, or another thread calls `wake`."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._members: dict[zmq.Socket[bytes], Waitable] = {}
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)

    def add(self, member: Waitable) -> None:
        self._members[member.zmq_socket] = member
        self._poller.register(member.zmq_socket, zmq.POLLIN)

    def remove(self, member: Waitable) -> None:
        """Must come before the member is closed."""
        if self._members.pop(member.zmq_socket, None) is not None:
            self._poller.unregister(member.zmq_socket)

    def wait(self, timeout_ms: int) -> list[Waitable]:
        """The members that have something to receive; none after the time or a `wake`."""
        ready = dict(self._poller.poll(timeout_ms))
        if ready.pop(self._woken.fileno(), None) is not None:
            with contextlib.suppress(BlockingIOError):
                while self._woken.recv(4096):
                    pass
        return [self._members[member] for member in ready]

    def wake(self) -> None:
        """Makes the current, or the next, `wait` return at once. Any thread; also after `close`."""
        with contextlib.suppress(OSError):  # full: a wake-up is pending already; closed: nobody waits
            self._waker.send(b"\0")

    def close(self) -> None:
        """Closes the hub, not its members."""
        self._woken.close()
        self._waker.close()
