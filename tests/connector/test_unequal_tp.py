"""P with more ranks than D, through both halves: every rank of D gets its heads, every rank of P its blocks back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from connector.mooncake import MooncakeTransport
from connector.settings import ConnectorSettings
from connector.tp_plan import servers_of
from connector.transport import Transport
from connector.worker_half import WorkerHalf
from tests.connector.faulty import FaultyTransport
from tests.connector.ranks import CELL, LAYERS, Ranks
from tests.connector.worlds import PATIENT, SOON_ALONE

SOURCE, TARGET = [5, 6, 7, 20], [30, 31, 3, 4]


class Engines:
    """Makes engines over one kind of transport, and closes them."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._fabric = MemoryFabric()
        self.made: list[Ranks] = []

    def transport(self) -> Transport:
        return MooncakeTransport() if self._kind == "mooncake" else MemoryTransport(self._fabric)

    def pair(self, prefill_tp: int, decode_tp: int, num_kv_heads: int) -> tuple[Ranks, Ranks]:
        """(P, D)"""
        return self.make("p", prefill_tp, num_kv_heads), self.make("d", decode_tp, num_kv_heads)

    def make(
        self, name: Literal["p", "d"], tp_size: int, num_kv_heads: int, settings: ConnectorSettings = PATIENT
    ) -> Ranks:
        transports = [FaultyTransport(self.transport()) for _ in range(tp_size)]
        role = "producer" if name == "p" else "consumer"
        self.made.append(Ranks(name, transports, role=role, num_kv_heads=num_kv_heads, settings=settings))
        return self.made[-1]

    def close(self) -> None:
        with ThreadPoolExecutor(max_workers=8) as pool:  # closing a Mooncake engine takes a second
            list(pool.map(Ranks.close, self.made))


@pytest.fixture(params=["memory", "mooncake"])
def real(request: pytest.FixtureRequest) -> Iterator[Engines]:
    engines = Engines(request.param)
    yield engines
    engines.close()


@pytest.fixture
def twin() -> Iterator[Engines]:
    engines = Engines("memory")
    yield engines
    engines.close()


def move(how: str, p: Ranks, d: Ranks, request_id: str = "r1", *, cached: int = 0, is_freed: bool = True) -> str:
    """60 tokens from SOURCE to TARGET; P's id. Until D, and P if `is_freed`, has reported."""
    if how == "pull":
        sent, params = p.prefill(request_id, SOURCE, 60)
        d.load(f"d-{request_id}", params, TARGET, 60, cached)
    else:
        if how == "push":
            d.receive(f"d-{request_id}", p.source, request_id, TARGET, 60, cached)
        sent = p.push(request_id, SOURCE, 60, chunk=20)
        if how == "late push":
            d.receive(f"d-{request_id}", p.source, request_id, TARGET, 60, cached)
    d.until(lambda: f"d-{request_id}" in d.received)
    p.until(lambda: sent in p.sent or not is_freed)
    return sent


@pytest.mark.parametrize("how", ["pull", "push", "late push"])
@pytest.mark.parametrize("num_kv_heads", [4, 1], ids=["heads", "latent"])
def test_two_ranks_serve_one(real: Engines, how: str, num_kv_heads: int):
    p, d = real.pair(2, 1, num_kv_heads)

    sent = move(how, p, d)

    assert d.holds("r1", TARGET)
    assert (d.received, d.failed, p.sent) == (["d-r1"], {}, [sent])
    assert d.num_bytes["d-r1"] == 4 * LAYERS * num_kv_heads * CELL


@pytest.mark.parametrize("how", ["pull", "push", "late push"])
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "num_kv_heads"), [(4, 2, 8), (4, 2, 4), (4, 2, 2), (4, 2, 1), (4, 1, 2), (2, 2, 1)]
)
def test_each_rank_gets_its_heads_once(twin: Engines, how: str, prefill_tp: int, decode_tp: int, num_kv_heads: int):
    p, d = twin.pair(prefill_tp, decode_tp, num_kv_heads)

    for number in range(3):  # other sources among replicas
        sent = move(how, p, d, f"r{number}")
        assert d.holds(f"r{number}", TARGET)
        assert p.sent_by[sent] == set(range(prefill_tp))

    assert not d.failed
    assert d.num_bytes["d-r1"] == 4 * LAYERS * max(num_kv_heads, decode_tp) * CELL


@pytest.mark.parametrize("how", ["pull", "push"])
def test_a_prefix_hit_at_d_moves_only_the_rest_from_every_rank(twin: Engines, how: str):
    p, d = twin.pair(2, 1, 4)
    d.memories[0].write("other", TARGET[:2])

    move(how, p, d, cached=32)

    memory = d.memories[0]
    assert memory.holds("other", TARGET[:2])
    assert [memory.block(block_id) for block_id in TARGET[2:]] == [memory.share_of("r1", index) for index in (2, 3)]


@pytest.mark.parametrize("how", ["pull", "push"])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_a_full_prefix_hit_frees_every_rank_without_a_byte(twin: Engines, how: str, num_kv_heads: int):
    p, d = twin.pair(4, 2, num_kv_heads)
    if how == "pull":
        sent, params = p.prefill("r1", SOURCE, 60)
        assert d.load("d1", params, TARGET, 60, cached=60) == 0
    else:
        assert d.receive("d1", p.source, "r1", TARGET, 60, cached=60) == 0
        sent = p.push("r1", SOURCE, 60)

    p.until(lambda: p.sent == [sent])

    assert p.sent_by[sent] == {0, 1, 2, 3}
    assert d.received == []


def test_spares_keep_their_blocks_while_the_source_is_read_and_are_freed_then(twin: Engines):
    p, d = twin.pair(2, 1, 1)
    gate = d.transports[0].gate
    gate.clear()
    sent, params = p.prefill("r1", SOURCE, 60)
    d.load("d1", params, TARGET, 60)
    assert d.transports[0].reading.wait(30)
    p.step()
    assert p.sent_by == {}

    gate.set()
    d.until(lambda: d.received == ["d1"])
    p.until(lambda: p.sent == [sent])

    assert d.holds("r1", TARGET)


def test_an_aborted_load_frees_sources_and_spares(twin: Engines):
    p, d = twin.pair(4, 1, 2)
    sent, params = p.prefill("r1", SOURCE, 60)
    d.load("d1", params, TARGET, 60)
    d.scheduler.request_finished("d1", TARGET, "aborted")

    d.until(lambda: d.received == ["d1"])
    p.until(lambda: p.sent == [sent])

    assert not d.failed


def test_one_rank_that_no_longer_has_its_blocks_fails_the_load(twin: Engines):
    p, d = twin.make("p", 2, 4), twin.make("d", 1, 4, SOON_ALONE)
    _, params = p.prefill("r1", SOURCE, 60)
    p.workers[1].shutdown()

    d.load("d1", params, TARGET, 60)
    d.until(lambda: d.received == ["d1"])

    assert "P does not answer" in d.failed["d1"]


def test_a_failed_read_of_one_rank_is_repeated_and_the_other_ranks_bytes_stay(real: Engines):
    p, d = real.pair(2, 1, 4)
    d.transports[0].fail_reads = 1

    move("pull", p, d)

    assert d.holds("r1", TARGET)
    assert not d.failed


def test_a_failed_write_of_one_rank_fences_and_everything_is_written(real: Engines):
    p, d = real.pair(2, 1, 4)
    p.transports[1].fail_writes = 1

    move("push", p, d)

    assert d.holds("r1", TARGET)
    assert not d.failed
    assert "fence" in d.transports[0].calls


def test_blocks_of_an_aborted_reader_are_not_safe_before_the_last_rank_has_ended(twin: Engines):
    p, d = twin.pair(2, 1, 4)
    slow = p.transports[1]
    slow.write_gate.clear()
    d.receive("d1", p.source, "r1", TARGET, 60)
    sent = p.push("r1", SOURCE, 60)
    assert slow.writing.wait(30)

    d.scheduler.request_finished("d1", TARGET, "aborted")
    d.step()
    d.step()
    assert d.received == []

    slow.write_gate.set()
    d.until(lambda: d.received == ["d1"])
    p.until(lambda: p.sent == [sent])

    assert not d.failed


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_an_aborted_prefill_fails_the_reader_and_frees_all_ranks(twin: Engines, num_kv_heads: int):
    p, d = twin.pair(4, 2, num_kv_heads)
    d.receive("d1", p.source, "r1", TARGET, 60)
    sent = p.push("r1", SOURCE, 60, chunk=20, finish="aborted")

    d.until(lambda: d.received == ["d1"])
    p.until(lambda: p.sent == [sent])

    assert "aborted" in d.failed["d1"]


@pytest.mark.parametrize("how", ["pull", "push"])
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "num_kv_heads", "cause"),
    [
        (1, 2, 4, "prefill has TP 1, decode TP 2"),
        (4, 2, 6, "6 KV heads neither divide prefill's 4 ranks"),
        (2, 1, 0, "prefill has TP 2, decode TP 1: this rank doesn't know"),
    ],
)
def test_illegal_shapes_are_refused_with_both_values(
    twin: Engines, how: str, prefill_tp: int, decode_tp: int, num_kv_heads: int, cause: str
):
    p, d = twin.pair(prefill_tp, decode_tp, num_kv_heads)

    move(how, p, d, is_freed=False)

    assert cause in d.failed["d-r1"]


@pytest.mark.parametrize("how", ["pull", "push"])
@pytest.mark.parametrize(("heads_at_p", "heads_at_d"), [(2, 4), (4, 2), (1, 2), (2, 1)])
def test_sides_with_different_numbers_of_heads_never_exchange_any(
    twin: Engines, how: str, heads_at_p: int, heads_at_d: int
):
    p, d = twin.make("p", 2, heads_at_p), twin.make("d", 1, heads_at_d)

    move(how, p, d, is_freed=False)

    assert "heads" in d.failed["d-r1"]


def test_only_the_replica_that_the_transfer_id_chooses_is_read_or_writes(twin: Engines):
    p, d = twin.pair(2, 1, 1)
    chosen = [servers_of(0, 1, 2, 1, f"r{number}").sources for number in range(6)]
    assert {(0,), (1,)} == set(chosen)

    for number, sources in enumerate(chosen):
        before = [transport.calls.count("write") for transport in p.transports]
        move("late push", p, d, f"r{number}")
        after = [transport.calls.count("write") for transport in p.transports]
        assert [rank for rank in range(2) if after[rank] > before[rank]] == list(sources)


def test_ranks_without_a_port_that_peers_can_find_are_refused():
    with pytest.raises(ValueError, match="side_channel_port is 0: with TP 2 it must be given"):
        WorkerHalf(
            PATIENT,
            engine_id="p",
            epoch="p-1",
            host="127.0.0.1",
            side_channel_port=0,
            rank=0,
            tp_size=2,
            transport=MemoryTransport(MemoryFabric()),
            fingerprint="",
            on_progress=lambda: None,
        )
