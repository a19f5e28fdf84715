"""The simulated engine's KV memory: what bytes a block must have, writing them and comparing them.

A block's bytes are its digest (64 bytes, made from the tokens it stands for, see `sim_chain.py`) repeated over the
whole block, XOR a pad that is different at every place of every layer. So each byte depends on all tokens before and
in the block, and bytes of another block, another place or another time are wrong; making 16 KiB costs 2 us, where
16 KiB out of SHAKE-128 would cost 40 us and hide what is to be measured.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from typing import Final

import numpy as np

from connector.layout import KvRegion

DIGEST_BYTES: Final = 64

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


class SimMemory:
    """Blocks lie one after the other; inside a block layer after layer. So a run of blocks is one piece of memory."""

    def __init__(self, num_blocks: int, block_bytes: int, *, num_layers: int, key: bytes) -> None:
        """`block_bytes` is a multiple of 8 * num_layers. Raises MemoryError or OSError."""
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self._memory = mmap.mmap(-1, num_blocks * block_bytes)  # pages that nobody touched cost nothing
        self._blocks = np.frombuffer(self._memory, dtype=np.uint64).reshape(num_blocks, block_bytes // 8)
        self._address = self._blocks.ctypes.data
        pad = hashlib.shake_128(b"pdq sim pad " + key).digest(block_bytes)
        self._pad = np.frombuffer(pad, dtype=np.uint64)
        self._repeats = -(-block_bytes // DIGEST_BYTES)
        self._scratch = np.zeros_like(self._pad)
        self._scratch_address = self._scratch.ctypes.data

    def regions(self) -> list[KvRegion]:
        """One per layer, all in one storage."""
        layer_bytes = self.block_bytes // self.num_layers
        return [
            KvRegion(
                layer=f"sim.layers.{layer}",
                base_address=self._address + layer * layer_bytes,
                block_stride_bytes=self.block_bytes,
                num_blocks=self.num_blocks,
                block_bytes=layer_bytes,
                storage_address=self._address,
                storage_bytes=self.num_blocks * self.block_bytes,
            )
            for layer in range(self.num_layers)
        ]

    def write(self, block_id: int, digest: bytes) -> None:
        np.bitwise_xor(self._pad, self._repeated(digest), out=self._blocks[block_id])

    def is_right(self, block_id: int, digest: bytes) -> bool:
        """Has the block exactly the bytes that `write` would give it?"""
        np.bitwise_xor(self._pad, self._repeated(digest), out=self._scratch)
        address = self._address + block_id * self.block_bytes
        return bool(_memcmp(self._scratch_address, address, self.block_bytes) == 0)

    def read(self, block_id: int) -> bytes:
        start = block_id * self.block_bytes
        return self._memory[start : start + self.block_bytes]

    def overwrite(self, block_id: int, offset: int, data: bytes) -> None:
        """What a stray writer would do; for tests."""
        start = block_id * self.block_bytes + offset
        self._memory[start : start + len(data)] = data

    def _repeated(self, digest: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.frombuffer(digest * self._repeats, dtype=np.uint64, count=len(self._pad))
