"""Pull that can't be: refused, restarted, gone. The same over the memory twin and over Mooncake."""

from __future__ import annotations

import threading

from pdq.wire.types import Pair
from tests.connector.worlds import SOON_ALONE, MakeWorld, World


def at_port(world: MakeWorld, port: int) -> World:
    """P again at a port that ZeroMQ is about to give back."""
    for _ in range(800):
        try:
            return world("p", role="producer", port=port)
        except OSError:
            threading.Event().wait(0.05)
    raise AssertionError(f"port {port} stays taken")


def test_of_two_readers_the_second_is_refused_after_the_first_was_done(world: MakeWorld):
    p, d1, d2 = world("p", role="producer"), world("d1", role="consumer"), world("d2", role="consumer")
    p.memory.scribble([1], seed=7)
    sent, params = p.prefill("r1", [1], num_tokens=16)
    d1.admit("x", params, 16)
    d2.admit("y", params, 16)

    d1.load("x", [9], 16)
    d1.until(lambda: bool(d1.received))
    p.until(lambda: p.sent == [sent])
    d2.load("y", [9], 16)
    d2.until(lambda: bool(d2.received))

    assert not d1.failed
    assert "gone" in d2.failed["y"]


def test_fingerprints_that_differ_are_refused_with_both_values(world: MakeWorld):
    p = world("p", role="producer", fingerprint="model=a dtype=float32")
    d = world("d", role="consumer", fingerprint="model=a dtype=bfloat16")
    _, params = p.prefill("r1", [1], num_tokens=16)
    d.admit("d1", params, 16)
    d.load("d1", [9], 16)

    d.until(lambda: bool(d.received))

    assert "dtype: float32 here, bfloat16 at the peer" in d.failed["d1"]


def test_regions_that_do_not_fit_are_refused_with_both_values(world: MakeWorld):
    p, d = world("p", role="producer", block_bytes=1024), world("d", role="consumer", block_bytes=2048)
    _, params = p.prefill("r1", [1], num_tokens=16)
    d.admit("d1", params, 16)
    d.load("d1", [9], 16)

    d.until(lambda: bool(d.received))

    assert "2048 bytes a head here, 1024 at the peer" in d.failed["d1"]


def test_a_restarted_p_never_answers_for_its_former_life(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    _, first = p.prefill("r1", [1], num_tokens=16)
    _, second = p.prefill("r2", [2], num_tokens=16)
    d.admit("d1", first, 16)
    d.load("d1", [9], 16)
    d.until(lambda: d.received == ["d1"])
    port = p.worker.port
    p.close()
    reborn = at_port(world, port)
    reborn.memory.scribble([1, 2, 3], seed=8)

    d.admit("d2", second, 16)
    d.load("d2", [10], 16)
    d.until(lambda: "d2" in d.received)
    _, third = reborn.prefill("r3", [3], num_tokens=16)
    d.admit("d3", third, 16)
    d.load("d3", [11], 16)
    d.until(lambda: "d3" in d.received)

    assert "restarted" in d.failed["d2"] or "is dead" in d.failed["d2"]
    assert d.failed.keys() == {"d2"}
    assert d.memory.block(11) == reborn.memory.block(3)


def test_a_p_that_is_not_there_fails_the_load_in_time(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer", settings=SOON_ALONE)
    _, params = p.prefill("r1", [1], num_tokens=16)
    p.close()
    d.admit("d1", params, 16)
    d.load("d1", [9], 16)

    d.until(lambda: bool(d.received))

    assert "does not answer" in d.failed["d1"]


def test_a_higher_pair_is_another_transfer(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    low, high = Pair(gen=1, attempt=1), Pair(gen=2, attempt=1)
    _, old = p.prefill("r1", [1], 16, low)
    newer, new = p.prefill("r1", [2], 16, high)
    p.memory.scribble([1, 2], seed=9)
    d.admit("old", old, 16)
    d.admit("new", new, 16)

    d.load("new", [9], 16)
    d.until(lambda: d.received == ["new"])
    p.until(lambda: p.sent == [newer])

    assert d.memory.block(9) == p.memory.block(2)
