"""The ports of a worker and of its engine, with a point before and after what they do. The product has none of this."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from broker.base import JobLease, Taken
from broker.links import NoticePeers
from broker.messages import Notice
from broker.redis_queue import RedisPrefillQueue
from connector.transport import PendingRead, Transport, TransportError
from engine.embedded.runner import Chunk, ChunkResult, LayerHook
from engine.embedded.sim_runner import SimRunner
from tests.faults.points import Points


class StoppableQueue:
    """A prefill worker's queue."""

    def __init__(self, inner: RedisPrefillQueue, points: Points) -> None:
        self._inner = inner
        self._points = points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def take(self, owner: str, **limits: Any) -> Taken:
        await self._points.at("before take")
        taken = await self._inner.take(owner, **limits)
        for lease in taken.leases:
            await self._points.at("claimed", lease.job.request_id)
        return taken

    async def renew(self, leases: tuple[JobLease, ...]) -> tuple[bool, ...]:
        await self._points.at("before renew")
        return await self._inner.renew(leases)

    async def settle(self, lease: JobLease, **end: str) -> bool:
        await self._points.at("before settle", lease.job.request_id)
        is_ours = await self._inner.settle(lease, **end)
        await self._points.at("after settle", lease.job.request_id)
        return is_ours

    async def give_back(self, lease: JobLease, *, failure: str | None) -> Any:
        await self._points.at("before give back", lease.job.request_id)
        return await self._inner.give_back(lease, failure=failure)


class StoppablePeers:
    """The questions that a process asks others."""

    def __init__(self, inner: NoticePeers, points: Points) -> None:
        self._inner = inner
        self._points = points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def request(self, endpoint: str, notice: Notice, **limits: Any) -> Notice:
        kind, about = type(notice).__name__, getattr(notice, "request_id", "")
        await self._points.at(f"before {kind}", about)
        answer = await self._inner.request(endpoint, notice, **limits)
        await self._points.at(f"after {kind}", about)
        return answer


Ranges = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Local addresses, the peer's, lengths."""


CANNOT_FENCE = "can't fence"
"""Among a worker's points: its engine's transport never succeeds in replacing itself, as on RDMA."""


class StoppableTransport:
    """The KV transport of an engine. A call that stops half-way is two calls, each for half of every range.

    The test's word decides how the second one ends:

        go      as it should
        fail    nothing more is moved, and the status says so
        deny    all is moved, and the status says that it failed
        cut     whatever connection it uses is closed under it
    """

    def __init__(self, inner: Transport, points: Points) -> None:
        self._inner = inner
        self._points = points
        self._others: set[Ends] = set()
        """Connections of the process that were there before its first transfer."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        self._inner.read(peer, *self._half_way(self._inner.read, "half read", peer, (local, remote, lengths)))
        self._at("read", peer)

    def begin_read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> PendingRead:
        ranges = self._half_way(self._inner.read, "half read", peer, (local, remote, lengths))
        self._at("read", peer)
        return self._inner.begin_read(peer, *ranges)

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        self._inner.write(peer, *self._half_way(self._inner.write, "half written", peer, (local, remote, lengths)))
        self._at("written", peer)

    def fence(self) -> None:
        if CANNOT_FENCE in self._points.names:
            raise TransportError("this transport can't be fenced")
        self._inner.fence()

    def _half_way(self, move: Callable[..., None], point: str, peer: str, ranges: Ranges) -> Ranges:
        """What is left to be moved."""
        if point not in self._points.names or peer == self._inner.address:
            return ranges
        self._others = self._others or set(_connections())
        local, remote, lengths = ranges
        halves = [length // 2 for length in lengths]
        move(peer, local, remote, halves)
        rest = (
            [start + half for start, half in zip(local, halves, strict=True)],
            [start + half for start, half in zip(remote, halves, strict=True)],
            [length - half for length, half in zip(lengths, halves, strict=True)],
        )
        word = self._at(point, peer)
        if word == "deny":
            move(peer, *rest)
        if word in ("fail", "deny"):
            raise TransportError("status -1, says the test")
        if word == "cut":
            with _cutting(self._others):
                move(peer, *rest)
            raise TransportError("it has outlived its connections")
        return rest

    def _at(self, point: str, peer: str) -> str:
        """Never in the start-up check, of a transport with itself."""
        return "go" if peer == self._inner.address else self._points.at_blocking(point)


Ends = tuple[tuple[str, int], tuple[str, int]]
"""Of a TCP connection, here and there."""


def _connections() -> dict[Ends, int]:
    """Of this process, with their file descriptors. Quick: some bytes take a millisecond only."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as one:
                    if one.family == socket.AF_INET:
                        found[one.getsockname(), one.getpeername()] = fd
    return found


@contextlib.contextmanager
def _cutting(others: set[Ends]) -> Iterator[None]:
    """All connections but the others are closed as soon as they are seen, from here to the end of the block."""
    is_over, has_begun = threading.Event(), threading.Event()

    def cut() -> None:
        while not is_over.is_set():
            for ends, fd in _connections().items():
                if ends not in others:
                    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as doomed:
                        doomed.shutdown(socket.SHUT_RDWR)
            has_begun.set()

    thread = threading.Thread(target=cut)
    thread.start()
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class StoppableRunner(SimRunner):
    """The simulated runner, which may stand still in mid step."""

    points: Points

    def run(self, batch: list[Chunk], before_layer: LayerHook, after_layer: LayerHook) -> list[ChunkResult]:
        prefills = [chunk for chunk in batch if chunk.num_tokens > 1]
        about = (prefills or batch)[0].sequence.engine_request_id
        point = "computing" if prefills else "decoding"

        def between_layers(layer: int) -> None:
            after_layer(layer)
            if layer == self.num_layers // 2 - 1:
                self.points.at_blocking(point, about)

        return super().run(batch, before_layer, between_layers)
