"""When a prefill worker takes jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from broker.base import DeadJob, JobLease, Taken
from broker.delivery import QueueSettings
from broker.memory import MemoryQueue
from engine.ledger import KvLedger
from pdq.wire.types import Pair
from prefill_worker.held import HeldJobs
from prefill_worker.settings import PrefillWorkerSettings
from prefill_worker.taker import Taker
from tests.broker.stores import LIMIT_S, job


def taker_of(
    queue: MemoryQueue,
    taken: asyncio.Queue[JobLease],
    *,
    is_stalled: Callable[[], bool],
    on_dead: Callable[[DeadJob], None],
) -> Taker:
    """Of an idle worker with room for ten blocks."""
    return Taker(
        worker_id="p1",
        queue=queue,
        held_jobs=HeldJobs(),
        ledger=KvLedger(total_blocks=10, block_size=16),
        settings=PrefillWorkerSettings(),
        is_stalled=is_stalled,
        prefill_time=lambda: None,
        on_lease=taken.put_nowait,
        on_dead=on_dead,
    )


async def test_a_worker_whose_engine_stands_still_takes_nothing_until_it_moves_again() -> None:
    queue = MemoryQueue(QueueSettings())
    is_stalled = True
    taken: asyncio.Queue[JobLease] = asyncio.Queue()

    def on_dead(dead: DeadJob) -> None:
        raise AssertionError(dead)

    taker = taker_of(queue, taken, is_stalled=lambda: is_stalled, on_dead=on_dead)
    await queue.enqueue(job("r1"))
    running = asyncio.create_task(taker.run())
    for _ in range(10):
        taker.room_changed()
        await asyncio.sleep(0)
    assert (await queue.depth()).running == 0

    is_stalled = False
    taker.room_changed()

    lease = await asyncio.wait_for(taken.get(), LIMIT_S)
    assert lease.job.request_id == "r1"
    taker.stop()
    await asyncio.wait_for(running, LIMIT_S)


class CutShortQueue(MemoryQueue):
    """Its first take ends with nothing but a dead job, and says that more is waiting."""

    is_first = True

    async def take(self, owner: str, **limits: Any) -> Taken:
        if not self.is_first:
            return await super().take(owner, **limits)
        self.is_first = False
        dead = DeadJob(
            request_id="late",
            pair=Pair(gen=1, attempt=0),
            gateway="tcp://127.0.0.1:1",
            gateway_id="gateway-a",
            reason="deadline",
            detail="",
        )
        return Taken(leases=(), dead=(dead,), is_more_waiting=True)


async def test_an_idle_worker_takes_what_waits_behind_jobs_that_have_ended() -> None:
    queue, ended = CutShortQueue(QueueSettings()), []
    taken: asyncio.Queue[JobLease] = asyncio.Queue()

    def on_dead(dead: DeadJob) -> None:
        ended.append(dead.request_id)

    taker = taker_of(queue, taken, is_stalled=lambda: False, on_dead=on_dead)
    await queue.enqueue(job("fine"))
    running = asyncio.create_task(taker.run())

    lease = await asyncio.wait_for(taken.get(), LIMIT_S)

    assert (lease.job.request_id, ended) == ("fine", ["late"])
    taker.stop()
    await asyncio.wait_for(running, LIMIT_S)


async def test_a_stall_that_was_excused_without_a_word_ends_the_wait() -> None:
    """As after SIGCONT: the engine is not to blame, and no step of it tells so."""
    queue = MemoryQueue(QueueSettings())
    taken: asyncio.Queue[JobLease] = asyncio.Queue()
    looks: list[bool] = [True]
    taker = taker_of(queue, taken, is_stalled=lambda: looks.pop() if looks else False, on_dead=lambda dead: None)
    await queue.enqueue(job("r1"))
    running = asyncio.create_task(taker.run())

    assert (await asyncio.wait_for(taken.get(), LIMIT_S)).job.request_id == "r1"
    taker.stop()
    await asyncio.wait_for(running, LIMIT_S)
