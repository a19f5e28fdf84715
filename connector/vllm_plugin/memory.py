"""vLLM's KV tensors -> regions. What the tensors say about themselves is checked, nothing is assumed.

A tensor is [blocks, heads, tokens, one token's K and V] of one layer; layers usually share one allocation, which is
registered once. A (block, head) cell is opaque: its inside depends on the attention kernel (ISA, packing), so it only
ever moves whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from connector.layout import KvRegion, LayoutError
from connector.tp_plan import heads_of


def regions_of(
    kv_caches: Mapping[str, Any],
    *,
    layers: Sequence[str],
    num_blocks: int,
    rank: int,
    tp_size: int,
    num_kv_heads: int,
) -> list[KvRegion]:
    """One region for each of `layers`, in the order that the tensors come in. Layers that share another's tensor have
    none of their own. `num_kv_heads`: of the whole model. Raises LayoutError, with the layer's name and both values."""
    if missing := sorted(set(layers) - kv_caches.keys()):
        raise LayoutError(f"no KV tensor was registered for {missing[:4]} ({len(missing)} layers)")
    wanted, seen, regions = set(layers), set[int](), []
    for layer, tensor in kv_caches.items():
        if layer in wanted and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            regions.append(_region(layer, tensor, num_blocks, *heads_of(rank, tp_size, num_kv_heads)))
    return regions


def _region(layer: str, tensor: Any, num_blocks: int, first_head: int, num_heads: int) -> KvRegion:
    shape, strides, item_bytes = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    if len(shape) == 3:  # MLA: [blocks, tokens, latent], one head without a dimension of its own
        shape, strides = (shape[0], 1, *shape[1:]), (strides[0], shape[1] * shape[2], *strides[1:])
    if len(shape) != 4:
        raise LayoutError(f"{layer}: KV tensor of shape {tuple(tensor.shape)}, expected [blocks, heads, tokens, size]")
    num_cells, cell = shape[1], shape[2] * shape[3]
    if shape[0] % num_blocks:
        raise LayoutError(f"{layer}: {shape[0]} blocks in the KV tensor, {num_blocks} in vLLM's block pool")
    if num_cells != num_heads:
        raise LayoutError(f"{layer}: {num_cells} KV heads in the tensor, {num_heads} expected on this rank")
    is_head_major = strides[2:] == (shape[3], 1) and (num_cells == 1 or strides[1] == cell)
    if not is_head_major or strides[0] < num_cells * cell:
        raise LayoutError(
            f"{layer}: KV tensor of shape {shape} has strides {strides}:"
            " expected blocks whose heads are contiguous cells"
        )
    block_bytes, num_parts = num_cells * cell * item_bytes, shape[0] // num_blocks
    if num_parts > 1:  # the kernel's blocks are smaller than the pool's: a block is several of them side by side
        if strides[0] != num_cells * cell or num_cells != 1:
            raise LayoutError(
                f"{layer}: {num_parts} kernel blocks make one block, with {num_cells} heads and stride {strides[0]}:"
                " only contiguous ones with one head can be moved; choose the kernel's block size as --block-size"
            )
        block_bytes *= num_parts
    storage = tensor.untyped_storage()
    return KvRegion(
        layer=layer,
        base_address=tensor.data_ptr(),
        block_stride_bytes=max(strides[0] * item_bytes * num_parts, block_bytes),
        num_blocks=num_blocks,
        block_bytes=block_bytes,
        num_heads=num_heads,
        first_head=first_head,
        storage_address=storage.data_ptr(),
        storage_bytes=storage.nbytes(),
    )
