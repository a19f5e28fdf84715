"""What happens around a write that waits, fails or is stopped: aborts, fences, preemption."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from connector.settings import ConnectorSettings
from tests.connector.faulty import FaultyTransport
from tests.connector.worlds import PATIENT, World, close_all

Make = Callable[..., tuple[World, FaultyTransport]]
HASTY = replace(PATIENT, kv_preempt_wait_s=0.2)


@pytest.fixture
def make() -> Iterator[Make]:
    fabric = MemoryFabric()
    worlds: list[World] = []
    transports: list[FaultyTransport] = []

    def build(name: str, role: str, settings: ConnectorSettings = PATIENT) -> tuple[World, FaultyTransport]:
        transports.append(FaultyTransport(MemoryTransport(fabric)))
        worlds.append(World(name, transports[-1], role=role, num_layers=4, settings=settings))
        return worlds[-1], transports[-1]

    yield build
    for transport in transports:
        transport.write_gate.set()
    close_all(worlds)


def gated(p: World, d: World, faults: FaultyTransport) -> tuple[str, list[bytes]]:
    """A whole push whose first write has begun and moves nothing yet."""
    faults.write_gate.clear()
    d.receive("d1", p.source, "r1", [10, 11], 32)
    sent = p.push("r1", [1, 2], 32)
    assert faults.writing.wait(30)
    return sent


def watch(world: World, rounds: int = 5) -> None:
    """Lets time pass in which nothing must happen."""
    for _ in range(rounds):
        world.progress.wait(0.05)
        world.step()


def test_blocks_of_an_aborted_reader_are_not_safe_before_ps_call_has_ended(make: Make):
    (p, faults), (d, _) = make("p", "producer"), make("d", "consumer")
    sent, _ = gated(p, d, faults)

    d.scheduler.request_finished("d1", [10, 11], "aborted")
    watch(d)
    while_writing = list(d.received)
    faults.write_gate.set()
    d.until(lambda: bool(d.received))
    p.until(lambda: p.sent == [sent])

    assert while_writing == []
    assert (d.received, d.failed) == (["d1"], {})


@pytest.mark.parametrize("how", ["abort", "release"])
def test_blocks_of_p_are_not_reported_before_its_call_has_ended(make: Make, how: str):
    (p, faults), (d, _) = make("p", "producer"), make("d", "consumer")
    if how == "release":
        request, _ = gated(p, d, faults)
        p.scheduler.release(request)
    else:
        faults.write_gate.clear()
        d.receive("d1", p.source, "r1", [10, 11], 32)
        request = p.begin_push("r1", 32)
        p.compute(request, [1, 2], 16, [b"a" * 1024])
        assert faults.writing.wait(30)
        p.finish_push(request, [1, 2], "aborted")

    watch(p)
    while_writing = list(p.sent)
    faults.write_gate.set()
    p.until(lambda: p.sent == [request])
    d.until(lambda: bool(d.received))

    assert while_writing == []
    assert "d1" in d.failed


def test_a_preemption_waits_for_the_write_that_reads_the_blocks_and_no_longer_than_set(make: Make):
    (p, faults), (d, _) = make("p", "producer"), make("d", "consumer")
    faults.write_gate.clear()
    d.receive("d1", p.source, "r1", [10, 11], 32)
    request = p.begin_push("r1", 32)
    p.compute(request, [1, 2], 16, [b"a" * 1024])
    assert faults.writing.wait(30)
    opener = threading.Timer(0.3, faults.write_gate.set)
    opener.start()

    p.compute(request, [5, 6], 32, [b"b" * 1024, b"c" * 1024], preempted=[request])  # returns after the write
    assert faults.write_gate.is_set()
    p.memory.fill(1, b"x" * 1024)
    p.finish_push(request, [5, 6])
    d.until(lambda: bool(d.received))

    assert [d.memory.block(10), d.memory.block(11)] == [b"b" * 1024, b"c" * 1024]
    opener.join()


def test_a_preemption_under_a_stalled_write_still_ends_with_the_right_bytes(make: Make):
    (p, faults), (d, _) = make("p", "producer", HASTY), make("d", "consumer")
    faults.write_gate.clear()
    d.receive("d1", p.source, "r1", [10, 11], 32)
    request = p.begin_push("r1", 32)
    p.compute(request, [1, 2], 16, [b"a" * 1024])
    assert faults.writing.wait(30)

    p.compute(request, [5, 6], 32, [b"b" * 1024, b"c" * 1024], preempted=[request])  # gives up waiting
    p.memory.fill(1, b"x" * 1024)  # anybody's now
    p.finish_push(request, [5, 6])
    faults.write_gate.set()
    d.until(lambda: bool(d.received))

    assert not d.failed
    assert [d.memory.block(10), d.memory.block(11)] == [b"b" * 1024, b"c" * 1024]


def test_a_failed_write_is_repeated_once_both_sides_have_fenced(make: Make):
    (p, faults), (d, other) = make("p", "producer"), make("d", "consumer")
    faults.fail_writes = 1
    d.receive("d1", p.source, "r1", [10, 11], 32)
    _, written = p.push("r1", [1, 2], 32)

    d.until(lambda: bool(d.received))

    assert not d.failed
    assert [d.memory.block(10), d.memory.block(11)] == written
    assert (faults.calls.count("fence"), other.calls.count("fence")) == (1, 1)


def test_writes_that_fail_again_and_again_fail_the_reader_behind_a_fence_and_free_p(make: Make):
    (p, faults), (d, other) = make("p", "producer"), make("d", "consumer")
    faults.fail_writes = 1000
    d.receive("d1", p.source, "r1", [10, 11], 32)
    sent, _ = p.push("r1", [1, 2], 32)

    d.until(lambda: bool(d.received))
    p.until(lambda: p.sent == [sent])

    assert "write failed" in d.failed["d1"]
    assert other.calls[-1] == "fence"


def test_a_fence_against_one_writer_does_not_harm_others(make: Make):
    (bad, faults), (good, slow), (d, _) = make("p1", "producer"), make("p2", "producer"), make("d", "consumer")
    slow.write_gate.clear()
    d.receive("d2", good.source, "r2", [20, 21], 32)
    _, written = good.push("r2", [1, 2], 32)
    assert slow.writing.wait(30)
    faults.fail_writes = 1

    d.receive("d1", bad.source, "r1", [10, 11], 32)
    bad.push("r1", [1, 2], 32)
    d.until(lambda: d.received == ["d1"])
    slow.write_gate.set()  # towards an address that is gone
    d.until(lambda: d.received == ["d1", "d2"])

    assert not d.failed
    assert [d.memory.block(20), d.memory.block(21)] == written


def test_a_fence_that_never_succeeds_is_fatal(make: Make):
    settings = replace(PATIENT, kv_quarantine_s=0.5)
    (p, faults), (d, _) = make("p", "producer", settings), make("d", "consumer")
    faults.fail_writes, faults.fail_fences = 1, 1000
    d.receive("d1", p.source, "r1", [10], 16)
    p.push("r1", [1], 16)

    fatal: list[str] = []
    p.until(lambda: bool(fatal or fatal.extend(filter(None, [p.step().fatal]))) or bool(fatal))

    assert "no fence after a failed write" in fatal[0]


def test_a_fence_that_fails_in_an_unknown_way_is_tried_again(make: Make):
    (p, faults), (d, other) = make("p", "producer"), make("d", "consumer")
    faults.fail_writes, faults.fail_fences, faults.fence_error = 1, 1, RuntimeError
    other.fail_fences, other.fence_error = 1, RuntimeError
    d.receive("d1", p.source, "r1", [10, 11], 32)
    _, written = p.push("r1", [1, 2], 32)

    d.until(lambda: bool(d.received))

    assert not d.failed
    assert [d.memory.block(10), d.memory.block(11)] == written
    assert (faults.calls.count("fence"), other.calls.count("fence")) == (2, 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["no fence", "the writing thread has ended"])
def test_a_writing_thread_that_can_not_go_on_says_so(make: Make, monkeypatch: pytest.MonkeyPatch, how: str):
    (p, faults), (d, _) = make("p", "producer", replace(PATIENT, kv_quarantine_s=0.1)), make("d", "consumer")
    faults.fail_writes, faults.fail_fences, faults.fence_error = 1, 1000, RuntimeError
    if how != "no fence":
        monkeypatch.setattr(faults, "write", _end_thread)
    d.receive("d1", p.source, "r1", [10], 16)
    sent, _ = p.push("r1", [1], 16)

    fatal: list[str] = []
    p.until(lambda: bool((reason := p.step().fatal) and not fatal.append(reason)))

    assert how in fatal[0]
    assert sent not in p.sent


def _end_thread(*_: object) -> None:
    raise SystemExit
