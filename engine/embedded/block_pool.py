"""The paged KV pool's book-keeping: who holds which block, which block content can be found again.

Pure: block ids in, block ids out. A block is in exactly one of three places:

    free     no content worth keeping; kept as runs of neighbours, so that a fresh prompt's blocks are neighbours
             and its transfer is few descriptors
    held     reference count > 0: in the block table of that many requests
    cached   nobody holds it, but it is full and its hash is known: found by `find_prefix`, evicted oldest first

Ask (`num_free`, `find_prefix`, `can_allocate`) and do (`allocate`, `share`, `publish`, `free`) are apart.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.embedded.free_runs import FreeRuns


class OutOfBlocks(Exception):
    """Asked to allocate more than `can_allocate` grants: our bug."""


class PoolCorrupt(Exception):
    """The book-keeping contradicts itself: our bug. The text has all the numbers."""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._runs = FreeRuns(num_blocks)
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # evicted from the front

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self._runs.num_blocks + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks whose content is only kept in case that a later prompt begins with it."""
        return len(self._cached)

    def is_held(self, block_id: int) -> bool:
        """Is it in somebody's block table?"""
        return self._refs[block_id] > 0

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest known prefix of this hash chain; empty when its first block isn't known."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def can_allocate(self, num_blocks: int, *, beside: Sequence[int] = ()) -> bool:
        """Is there room for `num_blocks` new blocks, once the blocks `beside` (found, to be shared) are held too?"""
        return self.num_free - sum(self._refs[block_id] == 0 for block_id in beside) >= num_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks with one reference each, ascending, neighbours where possible; evicts oldest cached ones."""
        if num_blocks > self.num_free:
            raise OutOfBlocks(
                f"{num_blocks} blocks asked, {self._runs.num_blocks} free and {len(self._cached)} cached "
                f"of {self.num_blocks}"
            )
        while self._runs.num_blocks < num_blocks:
            self._evict_oldest()
        taken = self._runs.take(num_blocks)
        for block_id in taken:
            self._refs[block_id] = 1
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """One more reference to each of these found blocks."""
        for block_id in block_ids:
            if self._refs[block_id] == 0:
                del self._cached[block_id]
            self._refs[block_id] += 1

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """The held block is full and final: let `find_prefix` find it. Of two with one content the first stays."""
        if self._refs[block_id] < 1:
            raise PoolCorrupt(f"block {block_id} is published but not held")
        if block_hash not in self._block_of and self._hash_of[block_id] is None:
            self._block_of[block_hash] = block_id
            self._hash_of[block_id] = block_hash

    def free(self, block_ids: Sequence[int]) -> None:
        """One reference less to each block of this block table."""
        # From the tail, so that eviction eats a prompt from its end and its beginning stays findable longest.
        for block_id in reversed(block_ids):
            if self._refs[block_id] < 1:
                raise PoolCorrupt(f"block {block_id} is freed but has {self._refs[block_id]} references")
            self._refs[block_id] -= 1
            if self._refs[block_id]:
                continue
            if self._hash_of[block_id] is None:
                self._runs.give(block_id)
            else:
                self._cached[block_id] = None

    def drop_cache(self) -> None:
        """Forget all content that nobody holds."""
        while self._cached:
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        self._hash_of[block_id] = None
        del self._block_of[block_hash]
        self._runs.give(block_id)

    def check_integrity(self) -> None:
        """Raises PoolCorrupt unless each block is in exactly one place and each hash leads to its block. O(blocks)."""
        free = set(self._runs.blocks())
        cached = set(self._cached)
        held = {block_id for block_id, refs in enumerate(self._refs) if refs > 0}
        numbers = (
            f"free {len(free)} (counted {self._runs.num_blocks}), cached {len(cached)}, held {len(held)}, "
            f"of {self.num_blocks}; hashes {len(self._block_of)}"
        )
        if len(free) != self._runs.num_blocks or len(free) + len(cached) + len(held) != self.num_blocks:
            raise PoolCorrupt(f"blocks lost or counted twice: {numbers}")
        if free & cached or free & held or cached & held:
            raise PoolCorrupt(
                f"blocks in two places: free+cached {sorted(free & cached)}, free+held {sorted(free & held)}, "
                f"cached+held {sorted(cached & held)}; {numbers}"
            )
        hashed = {block_id for block_id, block_hash in enumerate(self._hash_of) if block_hash is not None}
        if hashed != set(self._block_of.values()) or not cached <= hashed or hashed & free:
            raise PoolCorrupt(f"hash table and blocks disagree: {len(hashed)} blocks with a hash; {numbers}")
