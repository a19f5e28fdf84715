"""Where the tokens of one step are in the paged KV memory: index tensors, made once and used by every layer.

All indices are of layer 0; layer l adds l * blocks_per_layer times `layer_slots` (slots: one head of one position)
or `layer_rows` (rows: one head of one block). See `paged_cache.py` for the layout. Loads torch: import it lazily.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from engine.embedded.runner import Chunk

_PADDING_LIMIT: Final = 0.5
"""A sequence shorter than this part of its group's longest starts a group of its own: padding costs memory reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Shape of the KV memory, but for the number of blocks."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    layer_blocks: int = 0
    """Layer-major: blocks that lie side by side in each layer. 0: block-major, a block's layers lie side by side."""

    @property
    def layer_slots(self) -> int:
        return 2 * self.kv_heads * self.block_size

    @property
    def layer_rows(self) -> int:
        return 2 * self.kv_heads

    @property
    def blocks_per_layer(self) -> int:
        """From a layer of a block to the next layer of it, in layers of blocks."""
        return self.layer_blocks or 1

    @property
    def layers_per_block(self) -> int:
        """From a layer of a block to the same layer of the next block, in layers of blocks."""
        return 1 if self.layer_blocks else self.layers

    @property
    def block_elements(self) -> int:
        return self.layers * self.layer_slots * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeGroup:
    """Sequences of similar length with one token each in this step."""

    tokens: torch.Tensor
    """`[sequences]`: index of the token in the step."""
    gather: torch.Tensor
    """Rows of `[2, sequences, kv_heads, blocks]`."""
    bias: torch.Tensor
    """`[sequences * kv_heads, 1, positions]`: 0 where a position exists, -inf behind the sequence's end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkPlan:
    """Several tokens of one sequence."""

    first: int
    num_tokens: int
    num_positions: int
    gather: torch.Tensor
    """Rows of `[2, kv_heads, blocks]`."""
    bias: torch.Tensor | None
    """`[tokens, positions]`; None when the chunk starts at position 0 and is plainly causal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    input_ids: torch.Tensor
    positions: torch.Tensor
    write: torch.Tensor
    """Key slots of `[kv_heads, tokens]`; the value's slot is half a `layer_slots` further."""
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[ChunkPlan, ...]
    firsts: tuple[int, ...]
    """Index of each chunk's first token in the step."""


def plan_step(batch: Sequence[Chunk], geometry: Geometry, dtype: torch.dtype) -> StepPlan:
    """Lays the chunks' tokens behind each other. Chunks hold at least one token each."""
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    firsts: list[int] = []
    decodes: list[tuple[int, Chunk]] = []
    chunks: list[ChunkPlan] = []
    for chunk in batch:
        sequence, start = chunk.sequence, chunk.sequence.num_computed
        first, end = len(ids), start + chunk.num_tokens
        firsts.append(first)
        ids.extend(sequence.token_ids[start:end])
        positions.extend(range(start, end))
        blocks.extend(sequence.block_ids[position // geometry.block_size] for position in range(start, end))
        if chunk.num_tokens == 1:
            decodes.append((first, chunk))
        else:
            chunks.append(_plan_chunk(chunk, first, geometry, dtype))
    at = torch.tensor(positions)
    return StepPlan(
        input_ids=torch.tensor([ids]),
        positions=at.unsqueeze(0),
        write=_write_slots(torch.tensor(blocks), at, geometry),
        decodes=tuple(_plan_decodes(group, geometry, dtype) for group in _by_length(decodes)),
        chunks=tuple(chunks),
        firsts=tuple(firsts),
    )


def _write_slots(blocks: torch.Tensor, positions: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    in_block = blocks * (geometry.layers_per_block * geometry.layer_slots) + positions % geometry.block_size
    heads = torch.arange(geometry.kv_heads) * geometry.block_size
    return (heads[:, None] + in_block).view(-1)


def _gather_rows(tables: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """Rows of `[2, sequences, kv_heads, blocks]` for block tables `[sequences, blocks]`."""
    rows = (tables * (geometry.layers_per_block * geometry.layer_rows))[None, :, None, :]
    heads = torch.arange(geometry.layer_rows).view(2, 1, geometry.kv_heads, 1)
    return (rows + heads).view(-1)


def _plan_chunk(chunk: Chunk, first: int, geometry: Geometry, dtype: torch.dtype) -> ChunkPlan:
    start = chunk.sequence.num_computed
    end = start + chunk.num_tokens
    table = torch.tensor([chunk.sequence.block_ids[: _num_blocks(end, geometry)]])
    bias = None
    if start > 0:
        bias = torch.full((chunk.num_tokens, end), -torch.inf, dtype=dtype).triu_(start + 1)
    return ChunkPlan(
        first=first,
        num_tokens=chunk.num_tokens,
        num_positions=end,
        gather=_gather_rows(table, geometry),
        bias=bias,
    )


def _plan_decodes(group: list[tuple[int, Chunk]], geometry: Geometry, dtype: torch.dtype) -> DecodeGroup:
    lengths = [chunk.sequence.num_computed + 1 for _, chunk in group]
    width = _num_blocks(max(lengths), geometry)
    tables = []
    for (_, chunk), length in zip(group, lengths, strict=True):
        table = chunk.sequence.block_ids[: _num_blocks(length, geometry)]
        tables.append(table + table[-1:] * (width - len(table)))  # any block will do: masked
    exists = torch.arange(width * geometry.block_size) < torch.tensor(lengths)[:, None]
    bias = torch.zeros(exists.shape, dtype=dtype).masked_fill_(~exists, -torch.inf)
    return DecodeGroup(
        tokens=torch.tensor([first for first, _ in group]),
        gather=_gather_rows(torch.tensor(tables), geometry),
        bias=bias.repeat_interleave(geometry.kv_heads, dim=0).unsqueeze(1),
    )


def _by_length(decodes: list[tuple[int, Chunk]]) -> list[list[tuple[int, Chunk]]]:
    groups: list[list[tuple[int, Chunk]]] = []
    longest = 0
    for item in sorted(decodes, key=lambda item: item[1].sequence.num_computed, reverse=True):
        length = item[1].sequence.num_computed + 1
        if not groups or length < _PADDING_LIMIT * longest:
            groups.append([])
            longest = length
        groups[-1].append(item)
    return groups


def _num_blocks(num_positions: int, geometry: Geometry) -> int:
    return -(-num_positions // geometry.block_size)
