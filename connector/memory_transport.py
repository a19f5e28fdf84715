"""Transport twin: several transports of one process, joined by a fabric; bytes move by memmove."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence

from connector.transport import PendingRead, TransportError


class MemoryFabric:
    """The network: which transport answers at which address. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ports = itertools.count(15001)
        self._at: dict[str, MemoryTransport] = {}

    def join(self, host: str, transport: MemoryTransport) -> str:
        with self._lock:
            address = f"{host}:{next(self._ports)}"
            self._at[address] = transport
            return address

    def leave(self, address: str) -> None:
        with self._lock:
            self._at.pop(address, None)

    def find(self, address: str) -> MemoryTransport | None:
        with self._lock:
            return self._at.get(address)


class MemoryTransport:
    """Refuses what the real one refuses: unknown peers, memory that isn't registered, overlapping registrations."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self._fabric = fabric
        self._host = ""
        self._address = ""
        self._generation = 0
        self._memory: dict[int, int] = {}

    @property
    def address(self) -> str:
        return self._address

    @property
    def generation(self) -> int:
        return self._generation

    def start(self, host: str) -> str:
        self._host = host
        self._address = self._fabric.join(host, self)
        return self._address

    def register(self, address: int, num_bytes: int) -> None:
        for start, size in self._memory.items():
            if address < start + size and start < address + num_bytes:
                raise TransportError(f"{address:#x}+{num_bytes} overlaps registered {start:#x}+{size}")
        self._memory[address] = num_bytes

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        for here, there, length in self._checked(peer, local, remote, lengths):
            ctypes.memmove(here, there, length)

    def begin_read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> PendingRead:
        self.read(peer, local, remote, lengths)
        return _Done()

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        for here, there, length in self._checked(peer, local, remote, lengths):
            ctypes.memmove(there, here, length)

    def fence(self) -> None:
        self._fabric.leave(self._address)
        self._address = self._fabric.join(self._host, self)
        self._generation += 1

    def probe(self, peer: str) -> bool:
        return self._fabric.find(peer) is not None

    def close(self) -> None:
        self._fabric.leave(self._address)
        self._memory.clear()

    def covers(self, address: int, num_bytes: int) -> bool:
        return any(start <= address and address + num_bytes <= start + size for start, size in self._memory.items())

    def _checked(
        self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """The descriptors, once all of them are allowed."""
        other = self._fabric.find(peer)
        if other is None:
            raise TransportError(f"nobody at {peer}")
        descriptors = list(zip(local, remote, lengths, strict=True))
        for here, there, length in descriptors:
            if not self.covers(here, length):
                raise TransportError(f"local {here:#x}+{length} is not registered")
            if not other.covers(there, length):
                raise TransportError(f"{there:#x}+{length} is not registered at {peer}")
        return descriptors


class _Done:
    def is_done(self) -> bool:
        return True
