"""What happens around a read that waits or fails: aborts, leases, releases, fences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from tests.connector.faulty import FaultyTransport
from tests.connector.worlds import PATIENT, SHORT_LEASES, World, close_all

CLAIMS = replace(PATIENT, kv_direct_bytes=0)
"""D claims before it reads, as it does for large prompts and for a P that it hasn't heard of lately."""

Make = Callable[..., tuple[World, FaultyTransport]]


@pytest.fixture
def make() -> Iterator[Make]:
    fabric = MemoryFabric()
    worlds: list[World] = []
    transports: list[FaultyTransport] = []

    def build(name: str, role: str, **options: object) -> tuple[World, FaultyTransport]:
        transports.append(FaultyTransport(MemoryTransport(fabric)))
        worlds.append(World(name, transports[-1], role=role, **options))  # type: ignore[arg-type]
        return worlds[-1], transports[-1]

    yield build
    for transport in transports:
        transport.gate.set()
    close_all(worlds)


def start_gated_read(p: World, d: World, faults: FaultyTransport, name: str = "d1") -> str:
    """P's block 1 is on its way into D's block 9, but nothing moves yet. Returns P's engine request id."""
    p.memory.scribble([1, 2], seed=1)
    sent, params = p.prefill("r1", [1], num_tokens=16)
    faults.gate.clear()
    d.admit(name, params, 16)
    d.load(name, [9], 16)
    assert faults.reading.wait(30)
    return sent


def test_an_aborted_read_is_reported_only_after_its_call_has_ended(make: Make):
    (p, _), (d, faults) = make("p", "producer"), make("d", "consumer")
    sent = start_gated_read(p, d, faults)

    d.scheduler.request_finished("d1", [9], "aborted")
    for _ in range(5):
        d.progress.wait(0.05)
        d.step()
    while_reading = list(d.received)
    faults.gate.set()
    d.until(lambda: bool(d.received))
    p.until(lambda: p.sent == [sent])

    assert while_reading == []
    assert d.received == ["d1"]
    assert not d.failed


def test_a_release_waits_for_a_reader_that_has_claimed(make: Make):
    (p, _), (d, faults) = make("p", "producer"), make("d", "consumer", settings=CLAIMS)
    sent = start_gated_read(p, d, faults)

    p.scheduler.release(sent)
    for _ in range(5):
        p.progress.wait(0.05)
        p.step()
    while_reading = list(p.sent)
    faults.gate.set()
    d.until(lambda: bool(d.received))
    p.until(lambda: p.sent == [sent])

    assert while_reading == []
    assert not d.failed
    assert d.memory.block(9) == p.memory.block(1)


def test_a_read_that_outlives_its_lease_is_refused_by_verify(make: Make):
    p, _ = make("p", "producer", settings=replace(PATIENT, kv_lease_s=0.7))
    d, faults = make("d", "consumer", settings=replace(CLAIMS, kv_lease_s=60.0))  # renews far too seldom
    sent = start_gated_read(p, d, faults)

    p.until(lambda: p.sent == [sent])
    p.memory.fill(1, b"x" * 1024)  # the block belongs to another request now
    faults.gate.set()
    d.until(lambda: bool(d.received))

    assert "lease expired" in d.failed["d1"]


def test_a_long_read_is_renewed(make: Make):
    p, _ = make("p", "producer", settings=SHORT_LEASES)
    d, faults = make("d", "consumer", settings=SHORT_LEASES)
    other, _ = p.prefill("other", [3], num_tokens=16)
    start_gated_read(p, d, faults)

    p.until(lambda: other in p.sent)  # held longer than a lease
    faults.gate.set()
    d.until(lambda: bool(d.received))

    assert not d.failed


def test_a_release_ends_an_unclaimed_read_which_then_fails(make: Make):
    (p, _), (d, faults) = make("p", "producer"), make("d", "consumer")
    sent = start_gated_read(p, d, faults)

    p.scheduler.release(sent)
    p.until(lambda: p.sent == [sent])
    p.memory.fill(1, b"x" * 1024)  # the block belongs to another request now
    faults.gate.set()
    d.until(lambda: bool(d.received))

    assert "released" in d.failed["d1"]


def test_an_unclaimed_read_that_takes_long_is_renewed(make: Make):
    p, _ = make("p", "producer", settings=SHORT_LEASES)
    d, faults = make("d", "consumer", settings=SHORT_LEASES)
    other, _ = p.prefill("other", [3], num_tokens=16)
    sent = start_gated_read(p, d, faults)

    p.until(lambda: other in p.sent)  # nobody came for that one
    faults.gate.set()
    d.until(lambda: bool(d.received))
    p.until(lambda: sent in p.sent)

    assert not d.failed
    assert d.memory.block(9) == p.memory.block(1)


def test_two_readers_at_once_both_get_the_blocks_and_they_are_freed_once(make: Make):
    (p, _), (d2, _) = make("p", "producer"), make("d2", "consumer")
    d1, slow = make("d1", "consumer", settings=CLAIMS)
    p.memory.scribble([1], seed=1)
    sent, params = p.prefill("r1", [1], num_tokens=16)
    slow.gate.clear()
    d1.admit("x", params, 16)
    d1.load("x", [9], 16)
    assert slow.reading.wait(30)

    d2.admit("y", params, 16)
    d2.load("y", [9], 16)
    d2.until(lambda: bool(d2.received))
    p.step()
    before = list(p.sent)
    slow.gate.set()
    d1.until(lambda: bool(d1.received))
    p.until(lambda: bool(p.sent))

    assert before == []
    assert p.sent == [sent]
    assert not d1.failed
    assert not d2.failed
    assert d1.memory.block(9) == d2.memory.block(9) == p.memory.block(1)


def test_a_failed_call_is_repeated_once_behind_a_fence(make: Make):
    (p, _), (d, faults) = make("p", "producer"), make("d", "consumer")
    written = p.memory.scribble([1, 5], seed=1)
    _, params = p.prefill("r1", [1, 5], num_tokens=32)
    faults.fail_reads = 1
    d.admit("d1", params, 32)
    d.load("d1", [9, 4], 32)

    d.until(lambda: bool(d.received))

    assert not d.failed
    assert faults.calls == ["read", "fence", "read"]
    assert [d.memory.block(9), d.memory.block(4)] == written


def test_a_read_that_fails_twice_is_reported_behind_a_fence_and_p_keeps_its_blocks(make: Make):
    (p, _), (d, faults), (other, _) = make("p", "producer"), make("d", "consumer"), make("other", "consumer")
    p.memory.scribble([1], seed=1)
    sent, params = p.prefill("r1", [1], num_tokens=16)
    faults.fail_reads = 2
    d.admit("d1", params, 16)
    d.load("d1", [9], 16)

    d.until(lambda: bool(d.received))
    assert faults.calls == ["read", "fence", "read", "fence"]
    assert "status -1" in d.failed["d1"]
    other.admit("d2", params, 16)
    other.load("d2", [9], 16)
    other.until(lambda: bool(other.received))
    p.until(lambda: bool(p.sent))

    assert not other.failed
    assert p.sent == [sent]


def test_a_failed_read_is_not_reported_before_a_fence_succeeds(make: Make):
    (p, _), (d, faults) = make("p", "producer"), make("d", "consumer")
    _, params = p.prefill("r1", [1], num_tokens=16)
    faults.fail_reads, faults.fail_fences = 9, 2
    d.admit("d1", params, 16)
    d.load("d1", [9], 16)

    d.until(lambda: bool(d.received))

    assert faults.fenced.is_set()
    assert faults.calls[:4] == ["read", "fence", "fence", "fence"]


def test_without_any_fence_the_blocks_are_never_reported_but_the_half_says_so(make: Make):
    p, _ = make("p", "producer")
    d, faults = make("d", "consumer", settings=replace(PATIENT, kv_quarantine_s=0.1))
    _, params = p.prefill("r1", [1], num_tokens=16)
    faults.fail_reads, faults.fail_fences = 9, 99
    d.admit("d1", params, 16)
    d.load("d1", [9], 16)

    fatal: list[str] = []
    d.until(lambda: bool((reason := d.step().fatal) and not fatal.append(reason)))

    assert "no fence" in fatal[0]
    assert d.received == []
    assert faults.calls == ["read", "fence", "fence"]  # at once and 0.5 s later: for `kv_quarantine_s`, not twice that


def test_a_load_that_takes_too_long_fails_and_drains(make: Make):
    p, _ = make("p", "producer")
    d, faults = make("d", "consumer", settings=replace(PATIENT, kv_wait_s=3.0))
    start_gated_read(p, d, faults)

    threading.Event().wait(3.5)  # its time: nothing tells that it is over while the call lasts
    d.step()
    while_reading = list(d.received)
    faults.gate.set()
    d.until(lambda: bool(d.received))

    assert while_reading == []
    assert "not read within 3 s" in d.failed["d1"]


def test_p_that_shuts_down_tells_its_reader(make: Make):
    (p, _), (d, faults) = make("p", "producer"), make("d", "consumer")
    start_gated_read(p, d, faults)

    p.close()
    faults.gate.set()
    d.until(lambda: bool(d.received))

    assert "d1" in d.failed


def test_a_fence_that_fails_in_an_unknown_way_is_tried_again(make: Make):
    (p, _), (d, faults) = make("p", "producer"), make("d", "consumer")
    written = p.memory.scribble([1], seed=1)
    _, params = p.prefill("r1", [1], num_tokens=16)
    faults.fail_reads, faults.fail_fences, faults.fence_error = 1, 1, RuntimeError
    d.admit("d1", params, 16)
    d.load("d1", [9], 16)

    d.until(lambda: bool(d.received))

    assert faults.calls == ["read", "fence", "fence", "read"]
    assert not d.failed
    assert [d.memory.block(9)] == written


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["no fence", "the reading thread has ended"])
def test_a_reading_thread_that_can_not_go_on_says_so(make: Make, monkeypatch: pytest.MonkeyPatch, how: str):
    p, _ = make("p", "producer")
    d, faults = make("d", "consumer", settings=replace(PATIENT, kv_quarantine_s=0.1))
    _, params = p.prefill("r1", [1], num_tokens=16)
    faults.fail_reads, faults.fail_fences, faults.fence_error = 9, 99, RuntimeError
    if how != "no fence":
        monkeypatch.setattr(faults, "read", _end_thread)
    d.admit("d1", params, 16)
    d.load("d1", [9], 16)

    fatal: list[str] = []
    d.until(lambda: bool((reason := d.step().fatal) and not fatal.append(reason)))

    assert how in fatal[0]
    assert d.received == []


def _end_thread(*_: object) -> None:
    raise SystemExit
