"""One pushed job: reserved before it is computed, settled after it was told."""

from __future__ import annotations

from broker.delivery import QueueSettings
from broker.memory import MemoryQueue
from broker.messages import Accepted, Busy, Gone, KvReady, Reserve
from engine.base import PushKv
from tests.workers.job_world import SOURCE, World


async def test_push_reserves_before_it_computes_and_tells_what_it_took_before_it_settles() -> None:
    world = World(MemoryQueue(QueueSettings()), Accepted)

    await world.run(mode="push")

    reserve, ready = world.offers
    assert isinstance(reserve, Reserve)
    assert reserve.source == SOURCE
    assert isinstance(ready, KvReady)
    assert ready.ticket is None
    assert [request.kv for request in world.engine.submitted] == [PushKv()]
    assert (await world.queue.depth()).running == 0
    assert world.engine.released == world.engine.aborted == []


async def test_push_with_every_decode_worker_busy_computes_nothing_and_gives_the_job_back() -> None:
    world = World(MemoryQueue(QueueSettings()), Busy)

    await world.run(mode="push")

    assert world.engine.submitted == []
    assert (await world.queue.depth()).queued == 1


async def test_push_of_a_request_that_is_gone_computes_nothing_and_settles() -> None:
    world = World(MemoryQueue(QueueSettings()), Gone)

    await world.run(mode="push")

    depth = await world.queue.depth()
    assert world.engine.submitted == []
    assert (depth.queued, depth.running, depth.dead) == (0, 0, 0)
