"""A proxy for notices, in a thread of its own: whole messages are lost, delayed, repeated and reordered.

    def fate(passing):
        return LOST if isinstance(passing.message, KvReady) and passing.number <= 2 else ON_TIME

    with NoticeProxy(inbox_endpoint, host=ADVERTISED, port=p, fate=fate):

A message's fate is when it arrives: so many seconds later each, not at all, or several times. Unlike a connection, its
stream may have holes here; what a cut connection swallows looks like this to both ends.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import zmq

from broker.notices import NOTICES
from pdq.wire.endpoints import tcp_endpoint

Fate = tuple[float, ...]
ON_TIME: Final[Fate] = (0.0,)
LOST: Final[Fate] = ()
_POLL_MS: Final = 5
_LIMIT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """A message on its way."""

    message: Any
    number: int
    """Of its kind and request, from 1; repeats count."""


class NoticeProxy:
    def __init__(self, target: str, *, host: str, port: int, fate: Callable[[Passing], Fate]) -> None:
        """`target`: endpoint of the inbox. `fate` is called in the proxy's thread."""
        self._fate = fate
        self._target = target
        self._endpoint = tcp_endpoint(host, port)
        self._numbers: Counter[tuple[str, str]] = Counter()
        self._due: list[tuple[float, int, zmq.Socket[bytes], list[bytes]]] = []
        self._order = itertools.count()
        self._is_closing = False
        self._is_bound = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notice-proxy", daemon=True)

    def __enter__(self) -> NoticeProxy:
        self._thread.start()
        assert self._is_bound.wait(_LIMIT_S), f"can't listen on {self._endpoint}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        self._thread.join(_LIMIT_S)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        front = context.socket(zmq.ROUTER)
        front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        front.bind(self._endpoint)
        self._is_bound.set()
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        """Per client, a connection that calls itself as the client does."""
        poller = zmq.Poller()
        poller.register(front, zmq.POLLIN)
        try:
            while not self._is_closing:
                ready = dict(poller.poll(_POLL_MS))
                for client, back in list(backs.items()):
                    if back in ready:
                        (data,) = back.recv_multipart()
                        self._pass_on(front, [client, data])
                if front in ready:
                    client, data = front.recv_multipart()
                    if client not in backs:
                        backs[client] = back = context.socket(zmq.DEALER)
                        back.setsockopt(zmq.IDENTITY, client)
                        back.connect(self._target)
                        poller.register(back, zmq.POLLIN)
                    self._pass_on(backs[client], [data])
                while self._due and self._due[0][0] <= time.monotonic():
                    _, _, to, frames = heapq.heappop(self._due)
                    with contextlib.suppress(zmq.Again):
                        to.send_multipart(frames, zmq.NOBLOCK)
        finally:
            context.destroy(linger=0)

    def _pass_on(self, to: zmq.Socket[bytes], frames: list[bytes]) -> None:
        message, _ = NOTICES.decode(frames[-1])
        of = type(message).__name__, getattr(message, "request_id", "")
        self._numbers[of] += 1
        for delay_s in self._fate(Passing(message=message, number=self._numbers[of])):
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), to, frames))
