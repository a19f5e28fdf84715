"""The transport port: how bytes of KV blocks get from one process's memory into another's.

Adapters: `mooncake.py` (real) and `memory_transport.py` (one process, for tests and demos).
One thread at a time owns a transport: no method is called while another one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TransportError(Exception):
    """A call failed. After a failed read or write bytes may still move until `fence` has returned."""


class PendingRead(Protocol):
    """A read that was begun."""

    def is_done(self) -> bool:
        """Doesn't wait. True, once: the bytes are in place and nothing more moves. Raises TransportError, once."""


class Transport(Protocol):
    """Blocking calls that release the GIL. All raise TransportError, whose text names the cause."""

    @property
    def address(self) -> str:
        """What peers read from, `host:port`; changes with every fence."""

    @property
    def generation(self) -> int:
        """0 at the start, one more after each fence."""

    def start(self, host: str) -> str:
        """Opens the transport on this host address; returns `address`."""

    def register(self, address: int, num_bytes: int) -> None:
        """Makes memory readable and writable for peers, also after a fence. Ranges don't overlap."""

    def read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        """Copies peer memory here. When it returns, the bytes are in place and nothing more moves."""

    def begin_read(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> PendingRead:
        """`read` without the wait. Others may be begun meanwhile. A fence makes it fail."""

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        """Copies local memory to the peer. When it returns, the bytes are in the peer's memory."""

    def fence(self) -> None:
        """After it returns no earlier read or write of this side moves another byte. Changes `address`."""

    def probe(self, peer: str) -> bool:
        """False: nobody answers at that address."""

    def close(self) -> None:
        """Idempotent."""
