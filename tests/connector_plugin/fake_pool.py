"""Block pool with prefix cache, and the KV bytes that a model without weights would compute."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

from tests.connector_plugin.tensors import Tensor


class Pool:
    """Blocks are shared by reference count; a free one keeps its contents until it is taken."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks = deque(range(1, num_blocks))  # block 0 is vLLM's null block
        self._refs = [0] * num_blocks
        self._cached: dict[tuple[int, ...], int] = {}
        self._key_of: dict[int, tuple[int, ...]] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    def prefix(self, ids: Sequence[int]) -> list[int]:
        """Whole blocks that are cached; never the whole prompt, whose last token has to be computed."""
        found: list[int] = []
        while (len(found) + 1) * self.block_size < len(ids):
            block = self._cached.get(tuple(ids[: (len(found) + 1) * self.block_size]))
            if block is None:
                break
            found.append(block)
        return found

    def allocate(self, num_new: int, shared: Sequence[int] = ()) -> list[int] | None:
        """`shared` and so many more. None: there are not enough."""
        if num_new > self.num_free - sum(not self._refs[block] for block in shared):
            return None
        for block in shared:
            if not self._refs[block]:
                self.free_blocks.remove(block)
            self._refs[block] += 1
        taken = [self.free_blocks.popleft() for _ in range(num_new)]
        for block in taken:
            assert not self._refs[block]
            self._refs[block] = 1
            self._cached.pop(self._key_of.pop(block, ()), None)
        return taken

    def cache(self, ids: Sequence[int], blocks: Sequence[int], num_tokens: int) -> None:
        """Whole blocks of computed tokens may be shared from now on."""
        for index in range(min(num_tokens, len(ids)) // self.block_size):
            key = tuple(ids[: (index + 1) * self.block_size])
            if key not in self._cached and blocks[index] not in self._key_of:
                self._cached[key] = blocks[index]
                self._key_of[blocks[index]] = key

    def free(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was freed twice"
            if not self._refs[block]:
                self.free_blocks.append(block)


def chain(ids: Sequence[int]) -> list[bytes]:
    """Per position: stands for all tokens up to it."""
    links, link = [], b""
    for token in ids:
        link = blake2b(link + token.to_bytes(4, "little"), digest_size=16).digest()
        links.append(link)
    return links


def next_token(ids: Sequence[int]) -> int:
    return int.from_bytes(chain(ids)[-1][:2], "little")


class KvMemory:
    """Of one rank."""

    def __init__(self, tensors: dict[str, Tensor], *, first_head: int, block_size: int) -> None:
        self.tensors = tensors
        self._first_head = first_head
        self._block_size = block_size

    def write(self, layer: str, links: Sequence[bytes], blocks: Sequence[int], start: int, end: int) -> None:
        for position in range(start, end):
            for address, data in self._cells(layer, links, blocks, position):
                ctypes.memmove(address, data, len(data))

    def wrong_positions(self, layer: str, links: Sequence[bytes], blocks: Sequence[int], end: int) -> list[int]:
        """Of the positions before `end`: those whose bytes are not what the tokens make them."""
        return [
            position
            for position in range(end)
            if any(
                ctypes.string_at(address, len(data)) != data
                for address, data in self._cells(layer, links, blocks, position)
            )
        ]

    def _cells(
        self, layer: str, links: Sequence[bytes], blocks: Sequence[int], position: int
    ) -> list[tuple[int, bytes]]:
        tensor = self.tensors[layer]
        block, offset = blocks[position // self._block_size], position % self._block_size
        num_bytes = tensor.shape[3] * tensor.item_bytes
        cells = []
        for head in range(tensor.shape[1]):
            place = block * tensor.strides[0] + head * tensor.strides[1] + offset * tensor.strides[2]
            seed = links[position] + f"{layer}/{self._first_head + head}".encode()
            cells.append((tensor.data_ptr() + place * tensor.item_bytes, blake2b(seed, digest_size=num_bytes).digest()))
        return cells
