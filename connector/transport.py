"""The transport port: how bytes of KV blocks get from one process's memory into another's.

Adapters: `mooncake.py` (real) and `memory_transport.py` (one process, for tests and demos).
One thread owns a transport: no method is called while another one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TransportError(Exception):
    """A call failed. After a failed read or write bytes may still move until `fence` has returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRegion:
    """KV memory of one layer, or of all layers when a block holds them side by side.

    Block b lies at `base_address + b * block_stride_bytes` and is `block_bytes` long. With `block_bytes ==
    block_stride_bytes` neighbouring blocks are contiguous and a run of them is one descriptor.
    Inside a block lie `num_heads` equal cells, the first of which is head `first_head` of the model: the
    smallest part that ranks of unequal TP exchange. 1 cell: the block is exchanged whole (equal TP, MLA).
    """

    layer: str
    """Name that is equal on P and D, such as `model.layers.0` or `all`."""
    base_address: int
    block_stride_bytes: int
    num_blocks: int
    block_bytes: int = 0
    """0: as `block_stride_bytes`."""
    num_heads: int = 1
    first_head: int = 0
    storage_address: int = 0
    """Start of the allocation that the region lies in; 0: the region is its own. One registration per storage."""
    storage_bytes: int = 0

    @property
    def cell_bytes(self) -> int:
        return (self.block_bytes or self.block_stride_bytes) // self.num_heads

    @property
    def storage(self) -> tuple[int, int]:
        """(address, bytes) to register."""
        if self.storage_address:
            return self.storage_address, self.storage_bytes
        size = self.block_bytes or self.block_stride_bytes
        return self.base_address, (self.num_blocks - 1) * self.block_stride_bytes + size


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

    def write(self, peer: str, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> None:
        """Copies local memory to the peer. When it returns, the bytes are in the peer's memory."""

    def fence(self) -> None:
        """After it returns no earlier read or write of this side moves another byte. Changes `address`."""

    def probe(self, peer: str) -> bool:
        """False: nobody answers at that address."""

    def close(self) -> None:
        """Idempotent."""
