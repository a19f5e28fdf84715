"""The pool under random use: nothing lost, nothing in two places, fresh prompts get neighbours."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.embedded.block_hash import extend_hashes
from engine.embedded.block_pool import BlockPool, OutOfBlocks, PoolCorrupt
from engine.embedded.free_runs import FreeRuns

NUM_BLOCKS = 24


class PoolMachine(RuleBasedStateMachine):
    """Requests come with prompts from a small alphabet, so that prefixes meet; they end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # block id -> hash of what was last written there

    @rule(blocks=st.lists(st.integers(0, 2), min_size=1, max_size=8), is_published=st.booleans())
    def admit(self, blocks: list[int], is_published: bool) -> None:
        hashes: list[bytes] = []
        extend_hashes(hashes, blocks, len(blocks), 1)
        prefix = self.pool.find_prefix(hashes)
        assert [self.content[block_id] for block_id in prefix] == hashes[: len(prefix)]
        num_new = len(blocks) - len(prefix)
        if not self.pool.can_allocate(num_new, beside=prefix):
            return
        self.pool.share(prefix)
        new = self.pool.allocate(num_new)
        assert new == sorted(new)
        held = [block_id for table in self.tables for block_id in table]
        assert not set(new) & set(held)
        for block_id, block_hash in zip(new, hashes[len(prefix) :], strict=True):
            self.content[block_id] = block_hash
            if is_published:
                self.pool.publish(block_id, block_hash)
        self.tables.append(prefix + new)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.pool.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        if self.pool.can_allocate(1):
            self.tables[data.draw(st.integers(0, len(self.tables) - 1))] += self.pool.allocate(1)

    @rule()
    def drop_cache(self) -> None:
        self.pool.drop_cache()
        assert self.pool.num_cached == 0

    @invariant()
    def is_whole(self) -> None:
        self.pool.check_integrity()
        held = {block_id for table in self.tables for block_id in table}
        assert self.pool.num_free == NUM_BLOCKS - len(held)


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPoolUnderRandomUse = PoolMachine.TestCase


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_free_runs_are_maximal_and_cover_exactly_the_free_blocks(moves: list[tuple[bool, int]]):
    runs, taken = FreeRuns(40), []
    for is_take, count in moves:
        if is_take and count <= runs.num_blocks:
            taken += runs.take(count)
        elif not is_take and taken:
            runs.give(taken.pop(count % len(taken)))

        free = list(runs.blocks())
        assert sorted(free + taken) == list(range(40))
        starts = runs.runs()
        assert all(start + length not in starts for start, length in starts.items())


def test_a_fresh_prompt_gets_neighbours_although_there_are_crumbs():
    pool = BlockPool(64)
    tables = [pool.allocate(2) for _ in range(16)]
    for table in tables[::2]:
        pool.free(table)

    prompt = pool.allocate(20)

    assert prompt == list(range(prompt[0], prompt[0] + 20))


def test_a_decode_block_comes_from_the_crumbs():
    pool = BlockPool(64)
    first = pool.allocate(1)
    pool.allocate(10)
    pool.free(first)

    assert pool.allocate(1) == first


def test_a_prompt_evicted_from_its_tail_keeps_its_beginning_findable():
    pool = BlockPool(4)
    hashes: list[bytes] = []
    extend_hashes(hashes, [1, 2, 3, 4], 4, 1)
    table = pool.allocate(4)
    for block_id, block_hash in zip(table, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.free(table)

    pool.allocate(2)

    assert pool.find_prefix(hashes) == table[:2]


def test_shared_blocks_are_free_only_when_nobody_holds_them():
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.share(table)

    pool.free(table)
    assert pool.num_free == 2
    pool.free(table)
    assert pool.num_free == 4


def test_too_much_and_twice_are_refused_with_numbers():
    pool = BlockPool(3)
    table = pool.allocate(2)
    with pytest.raises(OutOfBlocks, match="2 blocks asked, 1 free and 0 cached of 3"):
        pool.allocate(2)
    pool.free(table)
    with pytest.raises(PoolCorrupt, match="0 references"):
        pool.free(table)


def test_found_blocks_that_nobody_holds_count_as_taken_when_asking_for_room():
    pool = BlockPool(3)
    hashes: list[bytes] = []
    extend_hashes(hashes, [1, 2], 2, 1)
    table = pool.allocate(2)
    for block_id, block_hash in zip(table, hashes, strict=True):
        pool.publish(block_id, block_hash)
    pool.free(table)

    assert pool.can_allocate(1, beside=table)
    assert not pool.can_allocate(2, beside=table)
