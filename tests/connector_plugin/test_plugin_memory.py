"""vLLM's KV tensors become regions; what doesn't look as expected is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from connector.layout import KvRegion, LayoutError, check_regions, storages
from connector.vllm_plugin.memory import regions_of
from tests.connector_plugin.tensors import Storage, Tensor, kv_tensors

LAYERS = ("l0", "l1", "l2")


def regions(tensors: dict[str, Tensor], **changes: Any) -> list[KvRegion]:
    options = {"layers": tuple(tensors), "num_blocks": 8, "rank": 0, "tp_size": 1, "num_kv_heads": 2}
    return regions_of(tensors, **(options | changes))


def test_each_layer_is_a_region_and_their_one_allocation_is_registered_once() -> None:
    tensors = kv_tensors(LAYERS, num_blocks=8, num_heads=2, block_size=4, size=6)

    found = regions(tensors)

    check_regions(found)
    assert [region.layer for region in found] == list(LAYERS)
    assert storages(found) == [(tensors["l0"].storage.data_ptr(), tensors["l0"].storage.num_bytes)]
    assert found[1].base_address == tensors["l1"].data_ptr()
    assert (found[1].block_stride_bytes, found[1].size_bytes) == (2 * 4 * 6 * 4, 2 * 4 * 6 * 4)
    assert (found[1].num_heads, found[1].cell_bytes, found[1].num_blocks) == (2, 4 * 6 * 4, 8)


def test_a_rank_of_several_holds_its_heads() -> None:
    found = regions(kv_tensors(LAYERS, num_blocks=8, num_heads=2), rank=3, tp_size=4, num_kv_heads=8)

    assert {(region.first_head, region.num_heads) for region in found} == {(6, 2)}


def test_blocks_that_are_wider_apart_than_long_keep_their_stride() -> None:
    storage = Storage(8 * 100 * 4)
    found = regions({"l0": Tensor(storage, 0, (8, 2, 4, 6), (100, 24, 6, 1))})

    assert (found[0].block_stride_bytes, found[0].size_bytes) == (400, 192)


def test_mla_has_one_cell_a_block() -> None:
    storage = Storage(8 * 4 * 9 * 2)
    found = regions({"l0": Tensor(storage, 0, (8, 4, 9), (36, 9, 1), 2)}, num_kv_heads=1)

    assert (found[0].num_heads, found[0].cell_bytes, found[0].block_stride_bytes) == (1, 72, 72)


def test_a_block_of_several_kernel_blocks_is_moved_whole() -> None:
    found = regions(kv_tensors(("l0",), num_blocks=16, num_heads=1), num_kv_heads=1)

    assert (found[0].num_blocks, found[0].size_bytes, found[0].block_stride_bytes) == (8, 64, 64)


def test_a_layer_that_shares_anothers_kv_has_no_region() -> None:
    tensors = kv_tensors(("l0", "l1"), num_blocks=8, num_heads=2)
    tensors["l2"] = replace(tensors["l0"])

    assert [region.layer for region in regions(tensors)] == ["l0", "l1"]


def test_layers_of_other_groups_are_left_out() -> None:
    found = regions(kv_tensors(LAYERS, num_blocks=8, num_heads=2), layers=("l2", "l0"))

    assert [region.layer for region in found] == ["l0", "l2"]


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (Tensor(Storage(4), 0, (8, 4, 2, 6), (48, 6, 24, 1)), "strides"),  # tokens before heads
        (Tensor(Storage(4), 0, (8, 2, 4, 6), (40, 24, 6, 1)), "strides"),  # blocks overlap
        (Tensor(Storage(4), 0, (2, 8, 2, 4, 6), (384, 48, 24, 6, 1)), "shape"),
        (Tensor(Storage(4), 0, (7, 2, 4, 6), (48, 24, 6, 1)), "7 blocks"),
        (Tensor(Storage(4), 0, (8, 3, 4, 6), (72, 24, 6, 1)), "3 KV heads in the tensor, 2 expected"),
        (Tensor(Storage(4), 0, (16, 2, 4, 6), (48, 24, 6, 1)), "kernel blocks"),
    ],
)
def test_what_is_laid_out_otherwise_is_refused(tensor: Tensor, complaint: str) -> None:
    with pytest.raises(LayoutError, match=complaint):
        regions({"l0": tensor}, num_kv_heads=tensor.shape[1] if "strides" in complaint else 2)


def test_a_layer_without_a_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match="l9"):
        regions(kv_tensors(LAYERS, num_blocks=8, num_heads=2), layers=("l0", "l9"))
