"""The paged KV memory of the torch runner, and attention over it. Loads torch and transformers: import it lazily.

Layout, block-major: `[num_blocks, layers, 2 (k, v), kv_heads, block_size, head_dim]`. A block's bytes over all layers
are contiguous, so a run of blocks is one transfer descriptor (pull). Layer-major: `[layers, num_blocks, ...]`, so it is
one descriptor per layer (push). One head's part of a block is contiguous in both, so one `index_select` of such rows
gathers `[2, sequences, kv_heads, positions, head_dim]` ready for a batched product.

The model runs on one flat row of all tokens of the step (batch size 1). Its attention modules call
 1. `PagedCache.update`, which writes the new keys and values of the layer into their blocks, and
 2. `PagedCache.attend`, registered as the model's attention function, which reads the blocks, sequence by sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import Cache

from engine.embedded.runner import LayerHook, RunnerError
from engine.embedded.step_plan import ChunkPlan, DecodeGroup, Geometry, StepPlan


class PagedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """All blocks of one engine. `begin` names the step that the following forward belongs to."""

    def __init__(self, geometry: Geometry, num_blocks: int, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        self._geometry = geometry
        outer = (geometry.layers, num_blocks) if geometry.layer_blocks else (num_blocks, geometry.layers)
        shape = (*outer, 2, geometry.kv_heads, geometry.block_size, geometry.head_dim)
        # zeros, not empty: slots that no token was written to are read with weight 0, and 0 * nan is nan
        self.pool = torch.zeros(shape, dtype=dtype)
        self._slots = self.pool.view(-1, geometry.head_dim)
        self._rows = self.pool.view(-1, geometry.block_size * geometry.head_dim)
        self._gathered = torch.empty((0, self._rows.shape[1]), dtype=dtype)
        self._plan: StepPlan | None = None
        self._before_layer: LayerHook = _no_hook
        self._after_layer: LayerHook = _no_hook

    def begin(self, plan: StepPlan, before_layer: LayerHook, after_layer: LayerHook) -> None:
        """Prepares for one forward over the tokens of `plan`."""
        self._plan, self._before_layer, self._after_layer = plan, before_layer, after_layer
        gathers = [group.gather for group in plan.decodes] + [chunk.gather for chunk in plan.chunks]
        most = max(rows.numel() for rows in gathers)
        if most > self._gathered.shape[0]:  # kept: a fresh large allocation costs more in page faults than the copy
            self._gathered = torch.empty((most * 5 // 4, self._rows.shape[1]), dtype=self.pool.dtype)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[1, kv_heads, tokens, head_dim]` into the blocks of the step; returns its arguments."""
        assert self._plan is not None
        self._before_layer(layer_idx)
        geometry = self._geometry
        keys = self._plan.write + layer_idx * geometry.blocks_per_layer * geometry.layer_slots
        self._slots.index_copy_(0, keys, key_states.reshape(-1, geometry.head_dim))
        self._slots.index_copy_(0, keys + geometry.layer_slots // 2, value_states.reshape(-1, geometry.head_dim))
        self._after_layer(layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are always given, nothing is derived from the cache's length."""
        return 0

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of each token to its own sequence up to its position; transformers' attention interface.

        Raises RunnerError for kinds of attention that this cache doesn't compute.
        """
        for name in ("sliding_window", "softcap", "s_aux"):
            if kwargs.get(name) is not None:
                raise RunnerError(f"the torch runner can't compute attention with {name}; use another model")
        assert self._plan is not None
        layer: int = module.layer_idx
        scale = self._geometry.head_dim**-0.5 if scaling is None else scaling
        output = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
        for group in self._plan.decodes:
            output.index_copy_(0, group.tokens, self._attend_decodes(group, query[0], layer, scale))
        for chunk in self._plan.chunks:
            part = query[:, :, chunk.first : chunk.first + chunk.num_tokens]
            output[chunk.first : chunk.first + chunk.num_tokens] = self._attend_chunk(chunk, part, layer, scale)
        return output.unsqueeze(0), None

    def _attend_decodes(self, group: DecodeGroup, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """`[sequences, heads, head_dim]`: one token per sequence, shorter ones padded and masked."""
        geometry, count = self._geometry, group.tokens.numel()
        keys, values = self._gather(group.gather, layer).view(2, count * geometry.kv_heads, -1, geometry.head_dim)
        queries = query.index_select(1, group.tokens).transpose(0, 1)  # heads of one kv head are neighbours
        queries = queries.reshape(count * geometry.kv_heads, -1, geometry.head_dim)
        scores = torch.baddbmm(group.bias, queries, keys.transpose(1, 2), alpha=scale)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(count, -1, geometry.head_dim)

    def _attend_chunk(self, chunk: ChunkPlan, query: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        """`[tokens, heads, head_dim]`: several tokens of one sequence, each up to its own position."""
        gathered = self._gather(chunk.gather, layer).view(2, 1, self._geometry.kv_heads, -1, self._geometry.head_dim)
        keys, values = gathered[..., : chunk.num_positions, :]
        result = scaled_dot_product_attention(
            query, keys, values, attn_mask=chunk.bias, is_causal=chunk.bias is None, scale=scale, enable_gqa=True
        )
        return result[0].transpose(0, 1)

    def _gather(self, rows: torch.Tensor, layer: int) -> torch.Tensor:
        found = self._gathered[: rows.numel()]
        first = layer * self._geometry.blocks_per_layer * self._geometry.layer_rows
        return torch.index_select(self._rows, 0, rows + first, out=found)


def _no_hook(layer: int) -> None:
    return None
