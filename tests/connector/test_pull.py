"""Pull through both halves, the same over the memory twin and over Mooncake."""

from __future__ import annotations

from tests.connector.worlds import SHORT_LEASES, MakeWorld


def test_the_blocks_of_a_prefill_arrive_and_are_freed_once(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    source, target = [5, 6, 7, 20], [40, 41, 3, 4]
    written = p.memory.scribble(source, seed=1)
    sent, params = p.prefill("r1", source, num_tokens=60)
    d.admit("d1", params, 60)

    assert d.load("d1", target, 60) == 60
    d.until(lambda: bool(d.received))
    p.until(lambda: bool(p.sent))

    assert [d.memory.block(block_id) for block_id in target] == written
    assert d.received == ["d1"]
    assert not d.failed
    assert p.sent == [sent]


def test_a_partial_prefix_hit_reads_only_the_rest(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    written = p.memory.scribble([1, 2, 3], seed=2)
    own = d.memory.scribble([10, 11, 12], seed=3)
    _, params = p.prefill("r1", [1, 2, 3], num_tokens=33)
    d.admit("d1", params, 33)

    assert d.load("d1", [10, 11, 12], 33, num_computed=16) == 17
    d.until(lambda: bool(d.received))

    assert d.memory.block(10) == own[0]
    assert [d.memory.block(11), d.memory.block(12)] == written[1:]
    assert d.stats["d1"].num_bytes == 2 * 1024


def test_a_full_prefix_hit_frees_p_without_a_read(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    sent, params = p.prefill("r1", [1, 2], num_tokens=32)
    d.admit("d1", params, 32)

    assert d.load("d1", [8, 9, 10], 32, num_computed=32) == 0
    p.until(lambda: bool(p.sent))

    assert p.sent == [sent]
    assert d.received == []


def test_a_thousand_scattered_blocks_arrive(world: MakeWorld):
    p = world("p", role="producer", num_blocks=1200)
    d = world("d", role="consumer", num_blocks=1200)
    source = [block_id for block_id in range(1150) if block_id % 8 != 3][:1000]
    target = list(range(1199, 199, -1))
    written = p.memory.scribble(source, seed=4)
    _, params = p.prefill("r1", source, num_tokens=16_000)
    d.admit("d1", params, 16_000)

    d.load("d1", target, 16_000)
    d.until(lambda: bool(d.received))

    assert not d.failed
    assert [d.memory.block(block_id) for block_id in target] == written
    assert d.stats["d1"].num_descriptors == 1000


def test_many_requests_at_once_get_their_own_blocks(world: MakeWorld):
    p, d = world("p", role="producer", num_blocks=256), world("d", role="consumer", num_blocks=256)
    written, tickets = {}, {}
    for n in range(32):
        blocks = list(range(n * 4, n * 4 + 4))
        written[n] = p.memory.scribble(blocks, seed=n)
        tickets[n] = p.prefill(f"r{n}", blocks, num_tokens=64)[1]

    for n in range(32):
        d.admit(f"d{n}", tickets[n], 64)
        d.load(f"d{n}", list(range(255 - n * 4, 251 - n * 4, -1)), 64)
    d.until(lambda: len(d.received) == 32)
    p.until(lambda: len(p.sent) == 32)

    assert not d.failed
    for n in range(32):
        assert [d.memory.block(block_id) for block_id in range(255 - n * 4, 251 - n * 4, -1)] == written[n]
    assert len(set(p.sent)) == 32


def test_a_reader_that_comes_before_p_knows_of_the_end_waits_for_it(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    p.memory.scribble([1], seed=5)
    request = p.begin_prefill("r1", 16)
    _, params = p.scheduler.request_finished(request, [1], "prefilled")
    assert params is not None
    d.admit("d1", params, 16)
    d.load("d1", [9], 16)
    d.worker.get_transfer_results()  # nothing yet: P's worker half has not been told

    p.step()
    d.until(lambda: bool(d.received))

    assert not d.failed
    assert d.memory.block(9) == p.memory.block(1)


def test_a_prefill_whose_first_token_is_the_last_is_handed_over(world: MakeWorld):
    p = world("p", role="producer")
    request = p.begin_prefill("r1", 16)

    assert p.scheduler.request_finished(request, [1], "stop")[0]


def test_an_aborted_prefill_is_gone_for_its_reader(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    ticket = p.prefill("r0", [1], num_tokens=16)[1]
    request = p.begin_prefill("r1", 16)
    assert p.scheduler.request_finished(request, [], "aborted") == (False, None)
    p.step()
    d.admit("d1", {**ticket, "pdq_transfer_id": "r1"}, 16)
    d.load("d1", [9], 16)

    d.until(lambda: bool(d.received))

    assert "gone" in d.failed["d1"]
    assert p.sent == []


def test_blocks_freed_before_the_claim_are_not_read(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    sent, params = p.prefill("r1", [1], num_tokens=16)
    d.admit("d1", params, 16)
    p.scheduler.release(sent)
    p.until(lambda: p.sent == [sent])

    d.load("d1", [9], 16)
    d.until(lambda: bool(d.received))

    assert "released" in d.failed["d1"]
    assert d.memory.block(9) == bytes(1024)


def test_a_waiting_reader_learns_early_that_the_blocks_are_gone(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    sent, params = p.prefill("r1", [1], num_tokens=16)
    p.scheduler.release(sent)
    p.until(lambda: p.sent == [sent])

    d.admit("d1", params, 16)
    gone: dict[str, str] = {}
    d.until(lambda: bool(gone.update(d.scheduler.take_gone()) or gone))

    assert "released" in gone["d1"]


def test_a_reader_that_queues_longer_than_a_lease_keeps_its_blocks(world: MakeWorld):
    p = world("p", role="producer", settings=SHORT_LEASES)
    d = world("d", role="consumer", settings=SHORT_LEASES)
    p.memory.scribble([1], seed=6)
    other, _ = p.prefill("r2", [2], num_tokens=16)
    _, params = p.prefill("r1", [1], num_tokens=16)
    d.admit("d1", params, 16)

    p.until(lambda: other in p.sent)  # the hold of the other prefill, longer than a lease, is over
    d.load("d1", [9], 16)
    d.until(lambda: bool(d.received))

    assert not d.failed
    assert d.memory.block(9) == p.memory.block(1)


def test_a_reader_aborted_in_the_queue_frees_p_at_once(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    sent, params = p.prefill("r1", [1], num_tokens=16)
    d.admit("d1", params, 16)

    assert d.scheduler.request_finished("d1", [], "aborted") == (False, None)
    p.until(lambda: p.sent == [sent])


def test_an_aborted_load_is_reported_once_and_frees_p(world: MakeWorld):
    p, d = world("p", role="producer"), world("d", role="consumer")
    sent, params = p.prefill("r1", [1], num_tokens=16)
    d.admit("d1", params, 16)
    d.load("d1", [9], 16)

    d.scheduler.request_finished("d1", [9], "aborted")
    d.until(lambda: bool(d.received))
    p.until(lambda: p.sent == [sent])

    assert d.received == ["d1"]
    assert not d.failed
