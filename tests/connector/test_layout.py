"""Runs cover every byte of the range once, nothing else, in as few pieces as possible."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.layout import (
    KvRegion,
    LayoutError,
    Runs,
    batches,
    check_fit,
    check_regions,
    plan_runs,
    storages,
)

NUM_BLOCKS = 12


@st.composite
def two_sides(draw: st.DrawFn) -> tuple[list[KvRegion], list[KvRegion], list[int], list[int]]:
    """Regions of D and P with the same cells, layer-major or block-major, D with some of P's heads or all or more."""
    num_layers, cell = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    first, heads = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    other_first = draw(st.integers(0, first + heads - 1))
    other_heads = draw(st.integers(first + 1 - other_first if other_first < first else 1, 4))

    def regions(base: int, first_head: int, num_heads: int) -> list[KvRegion]:
        size, block_major, pad = cell * num_heads, draw(st.booleans()), draw(st.integers(0, 2))
        stride = size * num_layers + pad if block_major else size + pad
        step = size if block_major else stride * NUM_BLOCKS + draw(st.integers(0, 3))
        return [
            KvRegion(
                layer=f"l{i}",
                base_address=base + i * step,
                block_stride_bytes=stride,
                block_bytes=size,
                num_blocks=NUM_BLOCKS,
                num_heads=num_heads,
                first_head=first_head,
            )
            for i in range(num_layers)
        ]

    count = draw(st.integers(0, NUM_BLOCKS))
    order = st.permutations(range(NUM_BLOCKS))
    straight = draw(st.booleans())
    local = sorted(draw(order)[:count]) if straight else draw(order)[:count]
    remote = list(range(count)) if straight else draw(order)[:count]
    return regions(1000, first, heads), regions(50_000, other_first, other_heads), local, remote


def expected_bytes(
    local: list[KvRegion], remote: list[KvRegion], local_blocks: list[int], remote_blocks: list[int]
) -> dict[int, int]:
    """Local address -> remote address, byte by byte."""
    pairs = {}
    for mine, theirs in zip(local, remote, strict=True):
        for here, there in zip(local_blocks, remote_blocks, strict=True):
            for head in range(mine.first_head, mine.first_head + mine.num_heads):
                if not theirs.first_head <= head < theirs.first_head + theirs.num_heads:
                    continue
                for byte in range(mine.cell_bytes):
                    at = mine.base_address + here * mine.block_stride_bytes
                    source = theirs.base_address + there * theirs.block_stride_bytes
                    at += (head - mine.first_head) * mine.cell_bytes + byte
                    source += (head - theirs.first_head) * theirs.cell_bytes + byte
                    pairs[at] = source
    return pairs


def covered(runs: Runs) -> list[tuple[int, int]]:
    return [
        (local + i, remote + i)
        for local, remote, length in zip(runs.local, runs.remote, runs.lengths, strict=True)
        for i in range(length)
    ]


@settings(max_examples=200, deadline=None)
@given(two_sides())
def test_every_byte_of_the_range_is_moved_exactly_once_in_the_fewest_runs(sides):
    local, remote, local_blocks, remote_blocks = sides
    check_regions(local)
    check_regions(remote)
    check_fit(local, remote)

    runs = plan_runs(local, remote, local_blocks, remote_blocks)

    expected = expected_bytes(local, remote, local_blocks, remote_blocks)
    moved = covered(runs)
    assert len(moved) == len(set(moved)) == len(expected)
    assert dict(moved) == expected
    starts = sum(expected.get(at - 1) != source - 1 for at, source in expected.items())
    assert len(runs) == starts


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 40), max_size=12),
    st.integers(1, 5),
    st.integers(1, 50),
)
def test_batches_hold_the_same_bytes_within_both_limits(lengths, max_descriptors, max_bytes):
    runs = Runs()
    for index, length in enumerate(lengths):
        runs.add(index * 100, 10_000 + index * 300, length)

    calls = batches(runs, max_descriptors=max_descriptors, max_bytes=max_bytes)

    assert [pair for call in calls for pair in covered(call)] == covered(runs)
    assert all(0 < len(call) <= max_descriptors and call.num_bytes <= max_bytes for call in calls)


def test_a_fresh_prompt_in_a_block_major_pool_is_one_run():
    pool = KvRegion(layer="all", base_address=4096, block_stride_bytes=1 << 20, num_blocks=600)
    peer = KvRegion(layer="all", base_address=1 << 40, block_stride_bytes=1 << 20, num_blocks=600)

    runs = plan_runs([pool], [peer], range(10, 522), range(64, 576))

    assert (runs.local, runs.remote, runs.lengths) == ([4096 + (10 << 20)], [(1 << 40) + (64 << 20)], [512 << 20])


def test_regions_that_share_a_storage_are_registered_once():
    layers = [
        KvRegion(layer=f"l{i}", base_address=1000 + 10 * i, block_stride_bytes=40, block_bytes=10, num_blocks=5)
        for i in range(4)
    ]
    apart = KvRegion(layer="x", base_address=9000, block_stride_bytes=8, num_blocks=2)
    named = KvRegion(
        layer="y", base_address=9500, block_stride_bytes=8, num_blocks=2, storage_address=9400, storage_bytes=500
    )

    assert storages([*layers, apart, named]) == [(1000, 200), (9000, 16), (9400, 500)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": "other"}, "layers differ"),
        ({"block_stride_bytes": 32}, "16 bytes a head here, 32 at the peer"),
        ({"first_head": 4}, "heads 0\\+1 here, 4\\+1 at the peer"),
    ],
)
def test_sides_that_do_not_fit_are_refused_with_both_values(change, message):
    fields = {"layer": "l0", "base_address": 1, "block_stride_bytes": 16, "num_blocks": 2}

    with pytest.raises(LayoutError, match=message):
        check_fit([KvRegion(**fields)], [KvRegion(**{**fields, **change})])


@pytest.mark.parametrize(
    ("local", "remote", "message"),
    [
        ([0, 1], [0], "2 blocks here, 1 at the peer"),
        ([0, 0], [0, 1], "twice"),
        ([0, 5], [0, 1], "0..5, but 4 exist here"),
        ([0, 1], [0, 9], "0..9, but 4 exist at the peer"),
        ([-1], [0], "-1"),
    ],
)
def test_block_ids_out_of_range_are_refused(local, remote, message):
    region = KvRegion(layer="l0", base_address=1, block_stride_bytes=16, num_blocks=4)

    with pytest.raises(LayoutError, match=message):
        plan_runs([region], [region], local, remote)


@pytest.mark.parametrize(
    "region",
    [
        KvRegion(layer="l0", base_address=1, block_stride_bytes=16, num_blocks=0),
        KvRegion(layer="l0", base_address=1, block_stride_bytes=16, block_bytes=17, num_blocks=1),
        KvRegion(layer="l0", base_address=1, block_stride_bytes=16, num_heads=3, num_blocks=1),
    ],
)
def test_a_region_that_contradicts_itself_is_refused(region):
    with pytest.raises(LayoutError):
        check_regions([region])
