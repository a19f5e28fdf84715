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
    """Of one block the layers lie side by side (a run of blocks is one piece of memory over all layers: pull), or,
    layer-major, all blocks of one layer do (a run of blocks is one piece per layer: push).
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, *, num_layers: int, key: bytes, is_layer_major: bool = False
    ) -> None:
        """`block_bytes` is a multiple of 8 * num_layers. Raises MemoryError or OSError."""
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self._layer_bytes = block_bytes // num_layers
        self._memory = mmap.mmap(-1, num_blocks * block_bytes)  # pages that nobody touched cost nothing
        words = np.frombuffer(self._memory, dtype=np.uint64)
        self._address = words.ctypes.data
        if is_layer_major:
            self._block_stride, self._layer_stride = self._layer_bytes, num_blocks * self._layer_bytes
            self._blocks = words.reshape(num_layers, num_blocks, self._layer_bytes // 8).swapaxes(0, 1)
        else:
            self._block_stride, self._layer_stride = block_bytes, self._layer_bytes
            self._blocks = words.reshape(num_blocks, num_layers, self._layer_bytes // 8)
        pad = hashlib.shake_128(b"pdq sim pad " + key).digest(block_bytes)
        self._pad = np.frombuffer(pad, dtype=np.uint64).reshape(num_layers, -1)
        self._repeats = -(-block_bytes // DIGEST_BYTES)
        self._scratch = np.zeros_like(self._pad)
        self._scratch_address = self._scratch.ctypes.data
        # pieces of a block that are contiguous in memory: all of it, or each layer
        self._pieces = num_layers if is_layer_major else 1

    def regions(self) -> list[KvRegion]:
        """One per layer, all in one storage."""
        return [
            KvRegion(
                layer=f"sim.layers.{layer}",
                base_address=self._address + layer * self._layer_stride,
                block_stride_bytes=self._block_stride,
                num_blocks=self.num_blocks,
                block_bytes=self._layer_bytes,
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
        size = self.block_bytes // self._pieces
        address = self._address + block_id * self._block_stride
        return not any(
            _memcmp(self._scratch_address + piece * size, address + piece * self._layer_stride, size)
            for piece in range(self._pieces)
        )

    def read(self, block_id: int) -> bytes:
        """Layer after layer."""
        return bytes(self._blocks[block_id].tobytes())

    def overwrite(self, block_id: int, offset: int, data: bytes) -> None:
        """What a stray writer would do; for tests. Within one layer of the block."""
        layer, offset = divmod(offset, self._layer_bytes)
        start = block_id * self._block_stride + layer * self._layer_stride + offset
        self._memory[start : start + len(data)] = data

    def _repeated(self, digest: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
        repeated = np.frombuffer(digest * self._repeats, dtype=np.uint64, count=self._pad.size)
        return repeated.reshape(self._pad.shape)
