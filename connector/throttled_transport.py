"""A transport that takes as long as a slower network would: to measure what is hidden behind a prefill."""

from __future__ import annotations

import time
from collections.abc import Sequence

from connector.transport import PendingRead, Transport


class ThrottledTransport:
    """Passes everything on; a call then lasts at least its bytes' time."""

    def __init__(self, inner: Transport, *, gbps: float) -> None:
        self._inner = inner
        self._bytes_per_s = gbps * 1e9 / 8

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def generation(self) -> int:
        return self._inner.generation

    def start(self, host: str) -> str:
        return self._inner.start(host)

    def register(self, address: int, num_bytes: int) -> None:
        self._inner.register(address, num_bytes)

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        began_s = time.perf_counter()
        self._inner.read(peer, local, remote, lengths)
        self._wait(began_s, lengths)

    def begin_read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> PendingRead:
        began_s = time.perf_counter()
        pending = self._inner.begin_read(peer, local, remote, lengths)
        return _Throttled(pending, began_s + sum(lengths) / self._bytes_per_s)

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        began_s = time.perf_counter()
        self._inner.write(peer, local, remote, lengths)
        self._wait(began_s, lengths)

    def fence(self) -> None:
        self._inner.fence()

    def probe(self, peer: str) -> bool:
        return self._inner.probe(peer)

    def close(self) -> None:
        self._inner.close()

    def _wait(self, began_s: float, lengths: Sequence[int]) -> None:
        left_s = began_s + sum(lengths) / self._bytes_per_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class _Throttled:
    """Not done before its bytes' time is over."""

    def __init__(self, pending: PendingRead, until_s: float) -> None:
        self._pending = pending
        self._until_s = until_s
        self._is_moved = False

    def is_done(self) -> bool:
        self._is_moved = self._is_moved or self._pending.is_done()
        return self._is_moved and time.perf_counter() >= self._until_s
