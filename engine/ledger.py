"""What a worker has promised of its engine's KV pool. Pure.

A worker counts blocks itself, from the moment it takes work until the engine reports the blocks released:
the engine's own numbers lag one step behind and know nothing of work that is on its way.
"""

from __future__ import annotations


class KvLedger:
    def __init__(self, *, total_blocks: int, block_size: int) -> None:
        """`total_blocks` of `block_size` tokens each."""
        self._total_blocks = total_blocks
        self._block_size = block_size
        self._promised: dict[str, int] = {}
        self._promised_blocks = 0

    def can_promise(self, num_tokens: int) -> bool:
        return self._blocks(num_tokens) <= self.free_blocks

    def could_ever_promise(self, num_tokens: int) -> bool:
        """False: this many tokens don't even fit into the empty pool."""
        return self._blocks(num_tokens) <= self._total_blocks

    def promise(self, engine_request_id: str, num_tokens: int) -> None:
        """Raises ValueError when this request has a promise already; ask `can_promise` first."""
        if engine_request_id in self._promised:
            raise ValueError(f"{engine_request_id} has a promise of {self._promised[engine_request_id]} blocks already")
        blocks = self._blocks(num_tokens)
        self._promised[engine_request_id] = blocks
        self._promised_blocks += blocks

    def release(self, engine_request_id: str) -> bool:
        """False: it had no promise (released before, or never taken)."""
        blocks = self._promised.pop(engine_request_id, None)
        if blocks is None:
            return False
        self._promised_blocks -= blocks
        return True

    def holds(self, engine_request_id: str) -> bool:
        return engine_request_id in self._promised

    @property
    def free_blocks(self) -> int:
        return self._total_blocks - self._promised_blocks

    @property
    def free_tokens(self) -> int:
        return self.free_blocks * self._block_size

    def tokens_for(self, num_requests: int) -> int:
        """So many tokens fit however they are spread over so many requests; each may leave its last block unfilled."""
        return max(0, self.free_blocks * self._block_size - (num_requests - 1) * (self._block_size - 1))

    @property
    def total_tokens(self) -> int:
        return self._total_blocks * self._block_size

    @property
    def is_empty(self) -> bool:
        return not self._promised

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
