"""Pull through both halves, the same over the memory twin and over Mooncake."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from connector.memory_transport import MemoryFabric, MemoryTransport
from connector.mooncake import MooncakeTransport
from connector.transport import Transport
from tests.connector.worlds import World

MakeWorld = Callable[..., World]


@pytest.fixture(params=["memory", "mooncake"])
def world(request: pytest.FixtureRequest) -> Iterator[MakeWorld]:
    fabric = MemoryFabric()
    worlds: list[World] = []

    def make(name: str, **options: object) -> World:
        transport: Transport = MemoryTransport(fabric) if request.param == "memory" else MooncakeTransport()
        worlds.append(World(name, transport, **options))  # type: ignore[arg-type]
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()


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
