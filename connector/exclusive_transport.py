"""Lets the reading and the writing thread share a transport: one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from connector.transport import PendingRead, Transport


class TransportBusy(Exception):
    """Another thread's call is under way, for seconds perhaps."""


class ExclusiveTransport:
    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def generation(self) -> int:
        return self._inner.generation

    def start(self, host: str) -> str:
        with self._lock:
            return self._inner.start(host)

    def register(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self._inner.register(address, num_bytes)

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        with self._lock:
            self._inner.read(peer, local, remote, lengths)

    def begin_read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> PendingRead:
        """Never waits for another thread's call. Raises TransportBusy."""
        if not self._lock.acquire(blocking=False):
            raise TransportBusy
        try:
            return self._inner.begin_read(peer, local, remote, lengths)
        finally:
            self._lock.release()

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        with self._lock:
            self._inner.write(peer, local, remote, lengths)

    def fence(self) -> None:
        with self._lock:
            self._inner.fence()

    def probe(self, peer: str) -> bool:
        return self._inner.probe(peer)

    def close(self) -> None:
        with self._lock:
            self._inner.close()
