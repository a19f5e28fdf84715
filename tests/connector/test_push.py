"""Push through both halves, the same over the memory twin and over Mooncake."""

from __future__ import annotations

import pytest

from pdq.wire.types import Pair
from tests.connector.worlds import MakeWorld, World


@pytest.fixture
def pair_of_worlds(world: MakeWorld) -> tuple[World, World]:
    return world("p", role="producer", num_layers=4), world("d", role="consumer", num_layers=4)


def settle(p: World, d: World) -> None:
    """Until D has its report and P its own."""
    d.until(lambda: bool(d.received))
    p.until(lambda: bool(p.sent))


@pytest.mark.parametrize("chunk", [1000, 16, 20, 7], ids=["whole", "blocks", "unaligned", "less than a block"])
def test_each_chunk_leaves_while_the_next_is_computed(pair_of_worlds: tuple[World, World], chunk: int):
    p, d = pair_of_worlds
    source, target = [5, 6, 7, 20], [40, 41, 3, 4]

    assert d.receive("d1", p.source, "r1", target, 60) == 60
    sent, written = p.push("r1", source, 60, chunk=chunk)
    settle(p, d)

    assert [d.memory.block(block_id) for block_id in target] == written
    assert (d.received, d.failed, p.sent) == (["d1"], {}, [sent])
    assert d.stats["d1"].num_bytes == 4 * 1024


def test_a_reader_that_comes_after_the_prefill_gets_everything_in_few_descriptors(pair_of_worlds):
    p, d = pair_of_worlds
    _, written = p.push("r1", [1, 2, 3, 4], 60, chunk=16)

    d.receive("d1", p.source, "r1", [10, 11, 12, 13], 60)
    settle(p, d)

    assert [d.memory.block(block_id) for block_id in (10, 11, 12, 13)] == written
    assert d.stats["d1"].num_descriptors == 4  # one per layer


def test_a_partial_prefix_hit_at_d_is_not_written(pair_of_worlds):
    p, d = pair_of_worlds
    own = d.memory.scribble([10], seed=3)

    assert d.receive("d1", p.source, "r1", [10, 11, 12], 40, num_computed=16) == 24
    _, written = p.push("r1", [1, 2, 3], 40)
    settle(p, d)

    assert [d.memory.block(block_id) for block_id in (10, 11, 12)] == [own[0], *written[1:]]
    assert d.stats["d1"].num_bytes == 2 * 1024


@pytest.mark.parametrize("num_computed", [32, 31])
def test_a_full_prefix_hit_at_d_writes_nothing_and_frees_p(pair_of_worlds, num_computed: int):
    p, d = pair_of_worlds

    assert d.receive("d1", p.source, "r1", [10, 11], 32, num_computed=num_computed) == 0
    sent, _ = p.push("r1", [1, 2], 32)
    p.until(lambda: p.sent == [sent])

    assert d.received == []
    assert d.memory.block(10) == bytes(1024)


def test_blocks_from_ps_prefix_cache_are_sent_with_the_first_chunk(pair_of_worlds):
    p, d = pair_of_worlds
    cached = p.memory.scribble([1, 2], seed=1)
    d.receive("d1", p.source, "r1", [10, 11, 12], 48)

    request = p.begin_push("r1", 48)
    p.compute(request, [1, 2, 3], 48, [*cached, b"n" * 1024])  # only the last block's tokens were scheduled
    p.finish_push(request, [1, 2, 3])
    settle(p, d)

    assert [d.memory.block(block_id) for block_id in (10, 11, 12)] == [*cached, b"n" * 1024]


def test_many_pushes_at_once_get_their_own_blocks(world: MakeWorld):
    p = world("p", role="producer", num_blocks=256, num_layers=4)
    d = world("d", role="consumer", num_blocks=256, num_layers=4)
    written = {}
    for n in range(32):
        d.receive(f"d{n}", p.source, f"r{n}", list(range(255 - n * 4, 251 - n * 4, -1)), 64)
        _, written[n] = p.push(f"r{n}", list(range(n * 4, n * 4 + 4)), 64, chunk=32)

    d.until(lambda: len(d.received) == 32)
    p.until(lambda: len(p.sent) == 32)

    assert not d.failed
    for n in range(32):
        assert [d.memory.block(block_id) for block_id in range(255 - n * 4, 251 - n * 4, -1)] == written[n]


def test_blocks_that_p_uses_again_are_not_written_any_more(pair_of_worlds):
    p, d = pair_of_worlds
    d.receive("d1", p.source, "r1", [10, 11], 32)
    request = p.begin_push("r1", 32)
    p.compute(request, [1, 2], 16, [b"a" * 1024])
    first = [b"b" * 1024, b"c" * 1024]

    p.compute(request, [5, 6], 32, first, preempted=[request])  # everything again, elsewhere
    p.memory.fill(1, b"x" * 1024)
    p.finish_push(request, [5, 6])
    settle(p, d)

    assert [d.memory.block(10), d.memory.block(11)] == first
    assert not d.failed


def test_an_aborted_prefill_fails_its_reader_at_once_and_blocks_are_reported(pair_of_worlds):
    p, d = pair_of_worlds
    d.receive("d1", p.source, "r1", [10, 11], 32)
    request = p.begin_push("r1", 32)
    p.compute(request, [1, 2], 16, [b"a" * 1024])

    p.finish_push(request, [1], "aborted")
    settle(p, d)

    assert "aborted" in d.failed["d1"]
    assert p.sent == [request]


def test_a_prefill_aborted_before_it_began_is_gone_for_its_reader(pair_of_worlds):
    p, d = pair_of_worlds
    request = p.begin_push("r1", 32)
    assert p.scheduler.request_finished(request, [], "aborted") == (False, None)
    p.step()

    d.receive("d1", p.source, "r1", [10, 11], 32)
    d.until(lambda: bool(d.received))

    assert "aborted" in d.failed["d1"]
    assert p.sent == []


def test_a_reader_aborted_while_it_waits_for_blocks_frees_p(pair_of_worlds):
    p, d = pair_of_worlds
    sent, _ = p.push("r1", [1, 2], 32)
    d.receive("d0", p.source, "r0", [20], 16)  # another one, to be waited for
    from connector.params import PushConsumer, params_of

    params = params_of(PushConsumer(transfer_id="r1", pair=Pair(gen=1, attempt=1), source=p.source))
    d.scheduler.on_new_request("d1", params, 32)
    d.scheduler.request_finished("d1", [], "aborted")

    p.until(lambda: p.sent == [sent])


def test_a_reader_aborted_while_it_receives_is_reported_once_and_frees_p(pair_of_worlds):
    p, d = pair_of_worlds
    d.receive("d1", p.source, "r1", [10, 11], 32)
    request = p.begin_push("r1", 32)
    p.compute(request, [1, 2], 16, [b"a" * 1024])

    d.scheduler.request_finished("d1", [10, 11], "aborted")
    d.until(lambda: bool(d.received))
    p.compute(request, [1, 2], 32, [b"a" * 1024, b"b" * 1024])
    p.finish_push(request, [1, 2])
    p.until(lambda: p.sent == [request])

    assert (d.received, d.failed) == (["d1"], {})
    assert d.memory.block(11) == bytes(1024)


def test_a_released_push_ends_and_fails_its_reader(pair_of_worlds):
    p, d = pair_of_worlds
    sent, _ = p.push("r1", [1, 2], 32)

    p.scheduler.release(sent)
    p.until(lambda: p.sent == [sent])
    d.receive("d1", p.source, "r1", [10, 11], 32)
    d.until(lambda: bool(d.received))

    assert "released" in d.failed["d1"]


def test_a_push_of_other_length_than_expected_is_refused(pair_of_worlds):
    p, d = pair_of_worlds
    d.receive("d1", p.source, "r1", [10, 11], 32)
    p.push("r1", [1, 2], 31)

    settle(p, d)

    assert "tokens: 31 at P, 32 at D" in d.failed["d1"]


def test_a_prefill_that_p_never_begins_fails_its_reader(world: MakeWorld):
    from dataclasses import replace

    from tests.connector.worlds import PATIENT

    p = world("p", role="producer", settings=replace(PATIENT, kv_wait_s=1.0))
    d = world("d", role="consumer")
    d.receive("d1", p.source, "r1", [10, 11], 32)

    d.until(lambda: bool(d.received))

    assert "did not begin" in d.failed["d1"]


def test_a_reader_for_another_life_of_p_is_told_gone(pair_of_worlds):
    from dataclasses import replace

    p, d = pair_of_worlds
    d.receive("d1", replace(p.source, epoch="before"), "r1", [10, 11], 32)

    d.until(lambda: bool(d.received))

    assert "restarted" in d.failed["d1"]


def test_fingerprints_that_differ_are_refused_with_both_values(world: MakeWorld):
    p = world("p", role="producer", fingerprint="dtype=float32")
    d = world("d", role="consumer", fingerprint="dtype=bfloat16")
    d.receive("d1", p.source, "r1", [10], 16)
    p.push("r1", [1], 16)

    settle(p, d)

    assert "bfloat16" in d.failed["d1"]
    assert "float32" in d.failed["d1"]
