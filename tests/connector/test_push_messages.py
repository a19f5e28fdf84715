"""Push's messages spoken by hand: each may come twice, late, early or from somebody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from connector.side_channel import (
    Cancel,
    Cancelled,
    Gone,
    Hello,
    Meta,
    Open,
    Opened,
    PushAck,
    PushDone,
    PushFail,
    RecvNoted,
    RecvReady,
    Request,
    SideMessage,
    codec,
    endpoint_of,
)
from pdq.wire.blocking import BlockingLink
from pdq.wire.types import pack_ids
from tests.connector.worlds import FINGERPRINT, FIRST, MakeWorld, World


@pytest.fixture
def make(world: MakeWorld) -> MakeWorld:
    return lambda name, role: world(name, role=role, num_layers=4)


class Peer:
    """Speaks to a half's side channel by hand."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.link: BlockingLink[SideMessage] = BlockingLink(
            codec(), endpoint_of("127.0.0.1", world.worker.port), identity="by-hand"
        )

    def ask(self, message: Request) -> SideMessage:
        return self.link.request(message, ref=id(message) % 2**31, timeout_s=30.0, tries=1)


@pytest.fixture
def peer() -> Iterator[Callable[[World], Peer]]:
    peers: list[Peer] = []

    def connect(world: World) -> Peer:
        peers.append(Peer(world))
        return peers[-1]

    yield connect
    for made in peers:
        made.link.close()


def names(world: World, transfer_id: str = "r1") -> dict[str, object]:
    return {"epoch": world.epoch, "transfer_id": transfer_id, "pair": FIRST}


def done(world: World, num_tokens: int = 32) -> PushDone:
    numbers = {"num_bytes": 1, "num_descriptors": 1, "seconds": 0.1, "hidden_seconds": 0.0}
    return PushDone(**names(world), producer="p-life", rank=0, num_tokens=num_tokens, **numbers)  # type: ignore[arg-type]


def test_every_message_to_d_may_come_twice_and_late(make: MakeWorld, peer: Callable[[World], Peer]):
    d, p = make("d", "consumer"), make("p", "producer")
    ask = peer(d).ask
    hello = Hello(epoch=d.epoch, consumer="p-life", rank=0, tp_size=1, fingerprint=FINGERPRINT)
    assert [type(ask(hello)) for _ in range(2)] == [Meta, Meta]
    opening = Open(**names(d), producer="p-life", rank=0, tp_size=1)  # type: ignore[arg-type]

    source = replace(p.source, epoch="p-life", port=p.worker.port)
    d.receive("d1", source, "r1", [10, 11], 32)
    assert [type(ask(opening)) for _ in range(2)] == [Opened, Opened]
    assert [type(ask(done(d))) for _ in range(2)] == [PushAck, PushAck]
    d.until(lambda: bool(d.received))
    late = [type(ask(message)) for message in (opening, done(d))]
    fail = PushFail(**names(d), producer="p-life", rank=0, reason="late", is_drained=False)  # type: ignore[arg-type]
    late.append(type(ask(fail)))
    d.step()

    assert late == [Gone, PushAck, PushAck]
    assert (d.received, d.failed) == (["d1"], {})
    assert d.dropped == []


def test_a_done_with_another_number_of_tokens_fails_the_reader(make: MakeWorld, peer: Callable[[World], Peer]):
    d, p = make("d", "consumer"), make("p", "producer")
    d.receive("d1", replace(p.source, epoch="p-life"), "r1", [10, 11], 32)

    peer(d).ask(done(d, num_tokens=31))
    d.until(lambda: bool(d.received))

    assert d.failed["d1"] == "P wrote 31 tokens, 32 were expected"


def test_every_message_to_p_may_come_twice_and_late(make: MakeWorld, peer: Callable[[World], Peer]):
    p, d = make("p", "producer"), make("d", "consumer")
    ask = peer(p).ask
    ready = RecvReady(
        **names(p),  # type: ignore[arg-type]
        consumer=d.epoch,
        host="127.0.0.1",
        port=d.worker.port,
        tp_size=1,
        block_size=16,
        num_tokens=32,
        first_block=0,
        block_ids=pack_ids([10, 11]),
    )
    assert [type(ask(ready)) for _ in range(2)] == [RecvNoted, RecvNoted]
    assert type(ask(replace(ready, consumer="another"))) is Gone
    cancel = Cancel(**names(p), consumer=d.epoch, reason="by hand")  # type: ignore[arg-type]
    assert type(ask(replace(cancel, consumer="another"))) is Cancelled

    assert [type(ask(cancel)) for _ in range(2)] == [Cancelled, Cancelled]
    assert type(ask(ready)) is Gone
    sent, _ = p.push("r1", [1, 2], 32)
    p.until(lambda: p.sent == [sent])

    assert d.memory.block(10) == bytes(1024)


def test_a_cancel_that_comes_before_everything_else_is_remembered(make: MakeWorld, peer: Callable[[World], Peer]):
    p, d = make("p", "producer"), make("d", "consumer")
    ask = peer(p).ask
    answer = ask(Cancel(**names(p), consumer=d.epoch, reason="early"))  # type: ignore[arg-type]
    assert isinstance(answer, Cancelled)
    assert answer.is_drained

    d.receive("d1", p.source, "r1", [10, 11], 32)
    d.until(lambda: bool(d.received))

    assert "cancelled" in d.failed["d1"]
