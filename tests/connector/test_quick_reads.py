"""Small reads that the IO thread does itself: from the second one of a peer on; what goes wrong goes to the reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from tests.connector.faulty import FaultyTransport
from tests.connector.worlds import PATIENT, World, close_all

Pair = tuple[World, World, FaultyTransport]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """P and D; D has read from P once."""
    fabric = MemoryFabric()
    faults = FaultyTransport(MemoryTransport(fabric))
    p = World("p", MemoryTransport(fabric), role="producer")
    d = World("d", faults, role="both", settings=replace(PATIENT, kv_hold_s=0.5))
    begin(p, d, "first", 1, 8)
    d.until(lambda: d.received == ["first"])
    assert faults.calls == ["read"]
    d.until(lambda: d.worker._io._reader.is_idle)  # its thread has a moment's work after that; small reads don't wait
    faults.calls.clear()
    faults.reading.clear()
    yield p, d, faults
    faults.gate.set()
    close_all([p, d])


def begin(p: World, d: World, name: str, block: int, into: int) -> str:
    p.memory.scribble([block], seed=block)
    sent, params = p.prefill(name, [block], num_tokens=16)
    d.admit(name, params, 16)
    d.load(name, [into], 16)
    return sent


def test_the_second_small_read_needs_no_other_thread(pair: Pair):
    p, d, faults = pair

    sent = begin(p, d, "r", 2, 9)
    d.until(lambda: "r" in d.received)
    p.until(lambda: sent in p.sent)

    assert faults.calls == ["begin", "end"]
    assert not d.failed
    assert d.memory.block(9) == p.memory.block(2)


def test_a_second_load_does_not_take_what_came_into_the_blocks_after_the_first(pair: Pair):
    p, d, _ = pair
    p.memory.scribble([2], seed=2)
    sent, params = p.prefill("r", [2], num_tokens=16)
    d.admit("r", params, 16)
    d.load("r", [9], 16)
    d.until(lambda: "r" in d.received)
    p.until(lambda: sent in p.sent)
    p.memory.scribble([2], seed=99)  # another prompt's

    d.admit("again", params, 16)
    d.load("again", [10], 16)
    d.until(lambda: "again" in d.received)

    assert "was read" in d.failed["again"]


def test_several_are_under_way_at_once(pair: Pair):
    p, d, faults = pair
    tickets = []
    for n in (2, 3, 4):
        p.memory.scribble([n], seed=n)
        tickets.append(p.prefill(f"r{n}", [n], num_tokens=16)[1])
        d.admit(f"r{n}", tickets[-1], 16)
    for n in (2, 3, 4):
        external, _ = d.scheduler.get_num_new_matched_tokens(f"r{n}", 16, 0)
        d.scheduler.update_state_after_alloc(f"r{n}", [n + 10], external or 0)
    d.step()

    d.until(lambda: {"r2", "r3", "r4"} <= set(d.received))

    assert faults.calls[:3] == ["begin"] * 3
    assert [d.memory.block(n + 10) for n in (2, 3, 4)] == [p.memory.block(n) for n in (2, 3, 4)]


def test_one_that_takes_long_goes_to_the_reading_thread_and_the_io_thread_goes_on(pair: Pair):
    p, d, faults = pair
    faults.gate.clear()
    begin(p, d, "slow", 2, 9)
    assert faults.reading.wait(30)

    held, params = d.prefill("d's own", [20], num_tokens=16)  # nobody comes: its hold ends while the read hangs
    d.until(lambda: held in d.sent)
    faults.gate.set()
    d.until(lambda: "slow" in d.received)

    assert params
    assert faults.calls == ["begin", "end"]
    assert not d.failed
    assert d.memory.block(9) == p.memory.block(2)


def test_one_that_fails_is_repeated_behind_a_fence(pair: Pair):
    p, d, faults = pair
    faults.fail_reads = 1

    begin(p, d, "r", 2, 9)
    d.until(lambda: "r" in d.received)

    assert faults.calls == ["begin", "end", "fence", "read"]
    assert not d.failed
    assert d.memory.block(9) == p.memory.block(2)


def test_one_that_was_begun_before_a_fence_is_read_anew(pair: Pair):
    p, d, faults = pair
    faults.gate.clear()
    begin(p, d, "r2", 2, 9)
    assert faults.reading.wait(30)
    begin(p, d, "r3", 3, 10)
    faults.fail_reads = 1
    faults.gate.set()

    d.until(lambda: {"r2", "r3"} <= set(d.received))

    assert faults.calls.count("fence") == 1
    assert not d.failed
    assert [d.memory.block(9), d.memory.block(10)] == [p.memory.block(2), p.memory.block(3)]


@pytest.mark.parametrize("settle", [lambda d: d.progress.wait(0.1), lambda d: None], ids=["handed over", "at once"])
def test_an_aborted_one_is_reported_only_after_its_end(pair: Pair, settle: Callable[[World], object]):
    p, d, faults = pair
    faults.gate.clear()
    sent = begin(p, d, "r", 2, 9)
    assert faults.reading.wait(30)
    settle(d)

    d.scheduler.request_finished("r", [9], "aborted")
    for _ in range(3):
        d.step()
        d.progress.wait(0.05)
    while_reading = list(d.received)
    faults.gate.set()
    d.until(lambda: "r" in d.received)
    p.until(lambda: sent in p.sent)

    assert "r" not in while_reading
    assert not d.failed


def test_one_that_meets_a_write_under_way_goes_to_the_reading_thread_and_the_io_thread_goes_on():
    fabric = MemoryFabric()
    faults = FaultyTransport(MemoryTransport(fabric))
    p = World("p", MemoryTransport(fabric), role="both")
    d = World("d", faults, role="both", settings=replace(PATIENT, kv_hold_s=0.5))
    begin(p, d, "first", 1, 8)
    d.until(lambda: d.received == ["first"])
    faults.write_gate.clear()
    p.receive("pushed", d.source, "push", [30], 16)
    _, written = d.push("push", [40], 16)
    assert faults.writing.wait(30)

    begin(p, d, "r", 2, 9)
    held, _ = d.prefill("d's own", [20], num_tokens=16)  # nobody comes: its hold ends while the write hangs
    d.until(lambda: held in d.sent)
    while_writing = list(faults.calls), list(d.received)
    faults.write_gate.set()
    d.until(lambda: "r" in d.received)
    p.until(lambda: "pushed" in p.received)
    close_all([p, d])

    assert while_writing == (["read", "write"], ["first"])
    assert not d.failed
    assert not p.failed
    assert d.memory.block(9) == p.memory.block(2)
    assert [p.memory.block(30)] == written
