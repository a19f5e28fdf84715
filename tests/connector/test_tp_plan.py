"""Every byte of a D rank's share comes from exactly one P rank; P's blocks wait for the one rank that needs them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.layout import KvRegion, LayoutError, check_fit, plan_runs
from connector.tp_plan import check_shares, consumer_of, heads_of, servers_of
from pdq.wire.tensor_parallel import shape_misfit

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32)
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
LEGAL = [(p, d, h) for p in SIZES for d in SIZES for h in HEADS if shape_misfit(p, d, h) is None]
NUM_BLOCKS, CELL = 5, 2


def regions_of(rank: int, tp_size: int, num_kv_heads: int, num_layers: int, base: int) -> list[KvRegion]:
    """One per layer and for K and V each, block-major."""
    first, count = heads_of(rank, tp_size, num_kv_heads)
    size = count * CELL
    return [
        KvRegion(
            layer=f"l{index // 2}.{'kv'[index % 2]}",
            base_address=base + index * size,
            block_stride_bytes=2 * num_layers * size,
            block_bytes=size,
            num_blocks=NUM_BLOCKS,
            num_heads=count,
            first_head=first,
        )
        for index in range(2 * num_layers)
    ]


def meaning_of(regions: list[KvRegion], blocks: list[int]) -> dict[int, tuple[str, int, int, int]]:
    """Address -> (layer, index of the block in the prompt, head of the model, byte of the head's cell)."""
    return {
        region.base_address + block * region.block_stride_bytes + cell * CELL + byte: (
            region.layer,
            index,
            region.first_head + cell,
            byte,
        )
        for region in regions
        for index, block in enumerate(blocks)
        for cell in range(region.num_heads)
        for byte in range(CELL)
    }


def test_the_legal_shapes_are_these():
    assert len(LEGAL) > 150
    assert {(4, 2, 8), (4, 2, 2), (4, 2, 1), (8, 2, 4), (2, 1, 8), (16, 8, 4), (4, 4, 4)} <= set(LEGAL)
    assert not {(2, 4, 8), (6, 4, 12), (4, 2, 6), (8, 2, 3)} & set(LEGAL)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(LEGAL), st.integers(1, 2), st.text(max_size=8), st.data())
def test_every_byte_of_ds_share_comes_from_exactly_one_source_and_means_the_same(shape, num_layers, transfer_id, data):
    prefill_tp, decode_tp, num_kv_heads = shape
    decode_rank = data.draw(st.integers(0, decode_tp - 1))
    count = data.draw(st.integers(0, NUM_BLOCKS))
    here, there = (data.draw(st.permutations(range(NUM_BLOCKS)))[:count] for _ in range(2))
    mine = regions_of(decode_rank, decode_tp, num_kv_heads, num_layers, 1000)
    wanted = meaning_of(mine, here)

    came_from: dict[int, int] = {}
    servers = servers_of(decode_rank, decode_tp, prefill_tp, num_kv_heads, transfer_id)
    for rank in servers.sources:
        theirs = regions_of(rank, prefill_tp, num_kv_heads, num_layers, 9_000_000)
        check_fit(mine, theirs)
        check_shares((decode_rank, decode_tp, num_kv_heads, mine), (rank, prefill_tp, num_kv_heads, theirs))
        offered = meaning_of(theirs, there)
        for direction in ("read", "written"):
            if direction == "read":
                runs = plan_runs(mine, theirs, here, there)
                triples = zip(runs.local, runs.remote, runs.lengths, strict=True)
            else:
                runs = plan_runs(theirs, mine, there, here)
                triples = zip(runs.remote, runs.local, runs.lengths, strict=True)
            found = {at + i: source + i for at, source, length in triples for i in range(length)}
            assert runs.num_bytes == len(found)
            assert all(wanted[at] == offered[source] for at, source in found.items())  # KeyError: outside D's share
            if direction == "read":
                assert not came_from.keys() & found.keys()
            came_from |= dict.fromkeys(found, rank)
            assert all(came_from[at] == rank for at in found)

    assert came_from.keys() == wanted.keys()


@pytest.mark.parametrize("transfer_id", ["a", "b", "req-17"])
def test_in_all_legal_shapes_sources_hold_each_head_once_and_every_rank_of_p_has_one_consumer(transfer_id):
    for prefill_tp, decode_tp, num_kv_heads in LEGAL:
        known = {}
        for decode_rank in range(decode_tp):
            servers = servers_of(decode_rank, decode_tp, prefill_tp, num_kv_heads, transfer_id)
            shares = [heads_of(rank, prefill_tp, num_kv_heads) for rank in servers.sources]
            first, count = heads_of(decode_rank, decode_tp, num_kv_heads)
            assert sorted(h for begin, n in shares for h in range(begin, begin + n)) == [*range(first, first + count)]
            for rank in (*servers.sources, *servers.spares):
                assert rank not in known
                known[rank] = decode_rank
        assert known == {rank: consumer_of(rank, prefill_tp, decode_tp) for rank in range(prefill_tp)}


def test_replicas_take_turns_by_transfer_id():
    chosen = {servers_of(0, 1, 4, 1, f"r{n}").sources for n in range(40)}

    assert chosen == {(0,), (1,), (2,), (3,)}
    assert servers_of(0, 1, 4, 2, "r0").spares in {(0, 2), (1, 3)}


def test_with_equal_tp_each_rank_reads_from_its_own_counterpart():
    for num_kv_heads in (0, 1, 4, 8):
        assert [servers_of(rank, 4, 4, num_kv_heads, "x").sources for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    assert [consumer_of(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "num_kv_heads", "message"),
    [
        (2, 4, 8, "prefill has TP 2, decode TP 4: equal sizes, or prefill's a multiple"),
        (6, 4, 12, "prefill has TP 6, decode TP 4"),
        (4, 2, 6, "prefill has TP 4, decode TP 2: 6 KV heads neither divide prefill's 4 ranks"),
        (8, 4, 0, "prefill has TP 8, decode TP 4: this rank doesn't know"),
        (2, 0, 2, "both must be at least 1"),
    ],
)
def test_illegal_shapes_are_refused_with_both_values(prefill_tp, decode_tp, num_kv_heads, message):
    with pytest.raises(LayoutError, match=message):
        servers_of(0, decode_tp, prefill_tp, num_kv_heads, "x")


def test_ranks_that_do_not_hold_the_heads_they_should_are_refused():
    mine, theirs = regions_of(0, 1, 4, 1, 1000), regions_of(1, 2, 4, 1, 1000)
    check_shares((0, 1, 4, mine), (1, 2, 4, theirs))

    with pytest.raises(LayoutError, match=r"rank 0 of 2 at the peer should hold heads 0\+2 of 4, but holds 2\+2"):
        check_shares((0, 1, 4, mine), (0, 2, 4, theirs))
    with pytest.raises(LayoutError, match="are 4 here, 8 at the peer"):
        check_shares((0, 1, 4, mine), (1, 2, 8, theirs))
    with pytest.raises(LayoutError, match="are 0 here, 0 at the peer"):
        check_shares((0, 1, 0, mine), (1, 2, 0, theirs))
    half = [dataclasses.replace(region, num_heads=2) for region in mine]
    with pytest.raises(LayoutError, match=r"heads 0\+4 here, 0\+2 at the peer, but TP 1 on both sides"):
        check_shares((0, 1, 4, mine), (0, 1, 4, half))
