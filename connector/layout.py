"""Block ids and memory regions of two ranks -> coalesced (local, remote, length) runs. Pure.

A run costs 60-100 us over TCP whatever its length, so neighbours are joined wherever both sides allow it: runs of
consecutive block ids, and regions that lie side by side inside a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class LayoutError(ValueError):
    """The two sides don't fit, or block ids are out of range; the text holds both values."""


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
    def size_bytes(self) -> int:
        """Of one block."""
        return self.block_bytes or self.block_stride_bytes

    @property
    def cell_bytes(self) -> int:
        return self.size_bytes // self.num_heads

    @property
    def storage(self) -> tuple[int, int]:
        """(address, bytes) to register."""
        if self.storage_address:
            return self.storage_address, self.storage_bytes
        return self.base_address, (self.num_blocks - 1) * self.block_stride_bytes + self.size_bytes


@dataclass(slots=True)
class Runs:
    """Three lists of equal length: what a transport takes."""

    local: list[int] = field(default_factory=list)
    remote: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths)

    def add(self, local: int, remote: int, length: int) -> None:
        """Joins the last run when both addresses go on from it."""
        if self.lengths:
            last = self.lengths[-1]
            if self.local[-1] + last == local and self.remote[-1] + last == remote:
                self.lengths[-1] = last + length
                return
        self.local.append(local)
        self.remote.append(remote)
        self.lengths.append(length)


def storages(regions: Sequence[KvRegion]) -> list[tuple[int, int]]:
    """(address, bytes) to register: overlapping ones merged, since a transport refuses overlaps."""
    merged: list[tuple[int, int]] = []
    for address, size in sorted({region.storage for region in regions}):
        if merged and address < merged[-1][0] + merged[-1][1]:
            start = merged[-1][0]
            merged[-1] = (start, max(sum(merged[-1]), address + size) - start)
        else:
            merged.append((address, size))
    return merged


def check_regions(regions: Sequence[KvRegion]) -> None:
    """Raises LayoutError when a region contradicts itself."""
    if not regions:
        raise LayoutError("no KV regions")
    for region in regions:
        if region.num_blocks < 1 or region.base_address < 1 or region.num_heads < 1:
            raise LayoutError(f"{region.layer}: {region} holds nothing")
        if region.size_bytes > region.block_stride_bytes:
            raise LayoutError(
                f"{region.layer}: a block of {region.size_bytes} bytes does not fit the stride of"
                f" {region.block_stride_bytes}"
            )
        if region.size_bytes % region.num_heads:
            raise LayoutError(f"{region.layer}: {region.size_bytes} bytes are no multiple of {region.num_heads} heads")
    if len({region.layer for region in regions}) != len(regions):
        raise LayoutError("two regions have one layer name")


def check_fit(local: Sequence[KvRegion], remote: Sequence[KvRegion]) -> None:
    """Raises LayoutError when blocks of one side mean something else on the other."""
    here, there = {r.layer: r for r in local}, {r.layer: r for r in remote}
    if here.keys() != there.keys():
        only_here, only_there = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
        raise LayoutError(
            f"layers differ: {len(here)} here, {len(there)} at the peer;"
            f" only here {only_here[:4]}, only at the peer {only_there[:4]}"
        )
    for name, mine in here.items():
        theirs = there[name]
        if mine.cell_bytes != theirs.cell_bytes:
            raise LayoutError(f"{name}: {mine.cell_bytes} bytes a head here, {theirs.cell_bytes} at the peer")
        first, end = _common_heads(mine, theirs)
        if first >= end:
            raise LayoutError(
                f"{name}: heads {mine.first_head}+{mine.num_heads} here,"
                f" {theirs.first_head}+{theirs.num_heads} at the peer: none in common"
            )


def plan_runs(
    local: Sequence[KvRegion], remote: Sequence[KvRegion], local_blocks: Sequence[int], remote_blocks: Sequence[int]
) -> Runs:
    """Runs that join local block i with remote block i, for each layer: every byte once, as few runs as possible.

    To be read or written. The regions fit (`check_fit`). Raises LayoutError when block ids are out of range, or one
    comes twice.
    """
    if len(local_blocks) != len(remote_blocks):
        raise LayoutError(f"{len(local_blocks)} blocks here, {len(remote_blocks)} at the peer")
    for where, ids in (("here", local_blocks), ("at the peer", remote_blocks)):
        if len(set(ids)) != len(ids):
            raise LayoutError(f"a block comes twice {where}")
    there = {region.layer: region for region in remote}
    spans = _block_spans(local_blocks, remote_blocks)
    pieces: list[tuple[int, int, int]] = []
    for mine in local:
        theirs = there[mine.layer]
        _check_range("here", mine, local_blocks)
        _check_range("at the peer", theirs, remote_blocks)
        first, end = _common_heads(mine, theirs)
        length = (end - first) * mine.cell_bytes
        local_base = mine.base_address + (first - mine.first_head) * mine.cell_bytes
        remote_base = theirs.base_address + (first - theirs.first_head) * mine.cell_bytes
        whole = length == mine.block_stride_bytes == theirs.block_stride_bytes
        for local_id, remote_id, count in spans:
            at = local_base + local_id * mine.block_stride_bytes
            source = remote_base + remote_id * theirs.block_stride_bytes
            if whole:
                pieces.append((at, source, length * count))
                continue
            for _ in range(count):
                pieces.append((at, source, length))
                at += mine.block_stride_bytes
                source += theirs.block_stride_bytes
    pieces.sort()
    runs = Runs()
    for piece in pieces:
        runs.add(*piece)
    return runs


def batches(runs: Runs, *, max_descriptors: int, max_bytes: int) -> list[Runs]:
    """The runs in calls of at most so many descriptors and bytes; longer runs are cut."""
    calls, call, room = [], Runs(), max_bytes
    for local, remote, length in zip(runs.local, runs.remote, runs.lengths, strict=True):
        done = 0
        while done < length:
            if len(call) == max_descriptors or room == 0:
                calls.append(call)
                call, room = Runs(), max_bytes
            part = min(length - done, room)
            call.add(local + done, remote + done, part)
            done += part
            room -= part
    if len(call):
        calls.append(call)
    return calls


def _common_heads(mine: KvRegion, theirs: KvRegion) -> tuple[int, int]:
    first = max(mine.first_head, theirs.first_head)
    return first, min(mine.first_head + mine.num_heads, theirs.first_head + theirs.num_heads)


def _check_range(where: str, region: KvRegion, blocks: Sequence[int]) -> None:
    if blocks and (min(blocks) < 0 or max(blocks) >= region.num_blocks):
        raise LayoutError(f"{region.layer}: blocks {min(blocks)}..{max(blocks)}, but {region.num_blocks} exist {where}")


def _block_spans(local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first local id, first remote id, count) of stretches that rise by one on both sides."""
    spans: list[tuple[int, int, int]] = []
    for local_id, remote_id in zip(local_blocks, remote_blocks, strict=True):
        if spans:
            first, source, count = spans[-1]
            if first + count == local_id and source + count == remote_id:
                spans[-1] = (first, source, count + 1)
                continue
        spans.append((local_id, remote_id, 1))
    return spans
