"""A transport with knobs: reads that wait, reads that fail, fences that fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from connector.transport import Transport, TransportError


class FaultyTransport:
    """Passes everything on to another transport, unless a knob says otherwise."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.gate = threading.Event()
        """A read waits for it before it moves anything."""
        self.gate.set()
        self.reading = threading.Event()
        """A read has begun."""
        self.fail_reads = 0
        """So many reads fail, after they moved their first descriptor."""
        self.write_gate = threading.Event()
        """A write waits for it before it moves anything."""
        self.write_gate.set()
        self.writing = threading.Event()
        """A write has begun."""
        self.fail_writes = 0
        """So many writes fail, after they moved their first descriptor."""
        self.slow_s = 0.0
        """Each write takes so long."""
        self.fail_fences = 0
        self.calls: list[str] = []
        self.fenced = threading.Event()

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
        self.calls.append("read")
        self.reading.set()
        assert self.gate.wait(20)
        if self.fail_reads:
            self.fail_reads -= 1
            self._inner.read(peer, local[:1], remote[:1], lengths[:1])
            raise TransportError("status -1")
        self._inner.read(peer, local, remote, lengths)

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        self.calls.append("write")
        self.writing.set()
        assert self.write_gate.wait(20)
        threading.Event().wait(self.slow_s)
        if self.fail_writes:
            self.fail_writes -= 1
            self._inner.write(peer, local[:1], remote[:1], lengths[:1])
            raise TransportError("status -1")
        self._inner.write(peer, local, remote, lengths)

    def fence(self) -> None:
        self.calls.append("fence")
        if self.fail_fences:
            self.fail_fences -= 1
            raise TransportError("no fence now")
        self._inner.fence()
        self.fenced.set()

    def probe(self, peer: str) -> bool:
        return self._inner.probe(peer)

    def close(self) -> None:
        self.gate.set()
        self.write_gate.set()
        self._inner.close()
