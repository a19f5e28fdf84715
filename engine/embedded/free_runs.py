"""Free block ids as runs of neighbours: whole prompts come from one run where possible.

Pure. Best fit: the smallest run that is long enough; when none is, the longest ones first. Single blocks (decode)
so use up the crumbs and long runs stay whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class FreeRuns:
    def __init__(self, num_blocks: int) -> None:
        """All of 0 .. num_blocks - 1 are free: one run."""
        self.num_blocks = num_blocks
        self._length_at: dict[int, int] = {0: num_blocks}  # first block -> length
        self._start_by_end: dict[int, int] = {num_blocks: 0}  # one past the last block -> first block
        self._by_length: list[tuple[int, int]] = [(num_blocks, 0)]  # sorted (length, first block)

    def take(self, num_blocks: int) -> list[int]:
        """Removes and returns that many blocks, ascending. The caller knows that there are enough."""
        taken: list[int] = []
        while len(taken) < num_blocks:
            wanted = num_blocks - len(taken)
            index = min(bisect_left(self._by_length, (wanted, 0)), len(self._by_length) - 1)
            length, start = self._by_length[index]
            self._remove(start, length)
            used = min(wanted, length)
            taken.extend(range(start, start + used))
            if used < length:
                self._add(start + used, length - used)
        self.num_blocks -= num_blocks
        taken.sort()
        return taken

    def give(self, block_id: int) -> None:
        """Adds one block, joined with its free neighbours."""
        start, length = block_id, 1
        left = self._start_by_end.get(block_id)
        if left is not None:
            left_length = self._length_at[left]
            self._remove(left, left_length)
            start, length = left, left_length + 1
        right_length = self._length_at.get(block_id + 1)
        if right_length is not None:
            self._remove(block_id + 1, right_length)
            length += right_length
        self._add(start, length)
        self.num_blocks += 1

    def runs(self) -> dict[int, int]:
        """First block -> length, of each run."""
        return dict(self._length_at)

    def blocks(self) -> Iterator[int]:
        for start, length in self._length_at.items():
            yield from range(start, start + length)

    def _add(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_by_end[start + length] = start
        insort(self._by_length, (length, start))

    def _remove(self, start: int, length: int) -> None:
        del self._length_at[start]
        del self._start_by_end[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
