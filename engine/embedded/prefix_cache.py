"""Which full blocks of a request are known, and which become known: the pool's hashes, per request."""

from __future__ import annotations

from engine.embedded.block_hash import extend_hashes
from engine.embedded.block_pool import BlockPool
from engine.embedded.request import Request


class PrefixCache:
    def __init__(self, pool: BlockPool, *, block_size: int, is_enabled: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._is_enabled = is_enabled

    def find(self, request: Request) -> list[int]:
        """Known blocks that its tokens begin with. Never up to the last token: its logits are needed."""
        if not (self._is_enabled and request.reads_prefix_cache):
            return []
        token_ids = request.sequence.token_ids
        num_blocks = (len(token_ids) - 1) // self._block_size
        extend_hashes(request.block_hashes, token_ids, num_blocks * self._block_size, self._block_size)
        return self._pool.find_prefix(request.block_hashes[:num_blocks])

    def publish(self, request: Request) -> None:
        """Its blocks that are full and computed become findable."""
        sequence = request.sequence
        num_full = sequence.num_computed // self._block_size
        if self._is_enabled and num_full > request.num_published:
            extend_hashes(request.block_hashes, sequence.token_ids, sequence.num_computed, self._block_size)
            for index in range(request.num_published, num_full):
                self._pool.publish(sequence.block_ids[index], request.block_hashes[index])
        request.num_published = num_full
