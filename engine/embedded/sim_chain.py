"""Digests of one sequence's blocks: SHAKE-128 of the key and all token ids from 0 to the block's last known one."""

from __future__ import annotations

import hashlib

from engine.embedded.sim_memory import DIGEST_BYTES
from pdq.wire.types import pack_ids


class Chain:
    """Grows with the sequence; a token is hashed once."""

    def __init__(self, key: bytes, block_size: int) -> None:
        self.num_hashed = 0
        self._block_size = block_size
        self._hash = hashlib.shake_128(b"pdq sim kv " + key + b"\0")
        self._full: list[bytes] = []

    def extend(self, token_ids: list[int], end: int) -> None:
        """Hashes the tokens up to, not including, position `end`."""
        block_size, start = self._block_size, self.num_hashed
        if end <= start:
            return
        packed = pack_ids(token_ids[start:end])
        position = start
        while position < end:
            stop = min(end, position - position % block_size + block_size)
            self._hash.update(packed[4 * (position - start) : 4 * (stop - start)])
            position = stop
            if position % block_size == 0:
                self._full.append(self._hash.digest(DIGEST_BYTES))
        self.num_hashed = end

    def digest(self, index: int) -> bytes:
        """Of block `index`: of a full block, or of the last one as far as it is hashed."""
        return self._full[index] if index < len(self._full) else self._hash.digest(DIGEST_BYTES)
