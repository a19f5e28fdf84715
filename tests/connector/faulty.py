"""A transport with knobs: reads that wait, reads that fail, fences that fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from connector.transport import PendingRead, Transport, TransportError


class FaultyTransport:
    """Passes everything on to another transport, unless a knob says otherwise."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
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
        self.fence_error: type[Exception] = TransportError
        """What a fence that fails raises."""
        self.calls: list[str] = []
        self.fenced = threading.Event()

    @property
    def address(self) -> str:
        return self.inner.address

    @property
    def generation(self) -> int:
        return self.inner.generation

    def start(self, host: str) -> str:
        return self.inner.start(host)

    def register(self, address: int, num_bytes: int) -> None:
        self.inner.register(address, num_bytes)

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        self.calls.append("read")
        self.reading.set()
        assert self.gate.wait(60)
        if self.fail_reads:
            self.fail_reads -= 1
            self.inner.read(peer, local[:1], remote[:1], lengths[:1])
            raise TransportError("status -1")
        self.inner.read(peer, local, remote, lengths)

    def begin_read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> PendingRead:
        self.calls.append("begin")
        self.reading.set()
        return _Begun(self, peer, local, remote, lengths, self.generation)

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        self.calls.append("write")
        self.writing.set()
        assert self.write_gate.wait(60)
        threading.Event().wait(self.slow_s)
        if self.fail_writes:
            self.fail_writes -= 1
            self.inner.write(peer, local[:1], remote[:1], lengths[:1])
            raise TransportError("status -1")
        self.inner.write(peer, local, remote, lengths)

    def fence(self) -> None:
        self.calls.append("fence")
        if self.fail_fences:
            self.fail_fences -= 1
            raise self.fence_error("no fence now")
        self.inner.fence()
        self.fenced.set()

    def probe(self, peer: str) -> bool:
        return self.inner.probe(peer)

    def close(self) -> None:
        self.gate.set()
        self.write_gate.set()
        self.inner.close()


class _Begun:
    """Ends when the gate is open."""

    def __init__(
        self,
        transport: FaultyTransport,
        peer: str,
        local: Sequence[int],
        remote: Sequence[int],
        lengths: Sequence[int],
        generation: int,
    ) -> None:
        self._transport = transport
        self._what = peer, local, remote, lengths
        self._generation = generation

    def is_done(self) -> bool:
        transport = self._transport
        assert self._generation == transport.generation, "asked after a fence"
        if not transport.gate.is_set():
            return False
        transport.calls.append("end")
        if transport.fail_reads:
            transport.fail_reads -= 1
            raise TransportError("status -1")
        transport.inner.read(*self._what)
        return True
