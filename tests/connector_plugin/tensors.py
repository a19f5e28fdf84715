"""KV tensors without torch: real memory, with the few questions that the plugin asks of a tensor."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from math import prod


@dataclass
class Storage:
    """One allocation."""

    num_bytes: int
    memory: ctypes.Array[ctypes.c_char] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = ctypes.create_string_buffer(self.num_bytes)

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def nbytes(self) -> int:
        return self.num_bytes


@dataclass
class Tensor:
    storage: Storage
    offset_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int = 4

    def data_ptr(self) -> int:
        return self.storage.data_ptr() + self.offset_bytes

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return self.item_bytes

    def untyped_storage(self) -> Storage:
        return self.storage


def kv_tensors(
    layers: tuple[str, ...],
    *,
    num_blocks: int,
    num_heads: int = 1,
    block_size: int = 4,
    size: int = 2,
    item_bytes: int = 4,
) -> dict[str, Tensor]:
    """All layers in one allocation, one after the other, as vLLM makes them."""
    shape = (num_blocks, num_heads, block_size, size)
    strides = (num_heads * block_size * size, block_size * size, size, 1)
    layer_bytes = prod(shape) * item_bytes
    storage = Storage(layer_bytes * len(layers))
    return {
        layer: Tensor(storage, index * layer_bytes, shape, strides, item_bytes) for index, layer in enumerate(layers)
    }
