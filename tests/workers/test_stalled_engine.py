"""An engine that hangs: its work goes on elsewhere, everybody sees it, and in the end its worker goes."""

from __future__ import annotations

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry

from broker.base import JobLease
from broker.delivery import QueueSettings
from broker.memory import MemoryQueue
from broker.messages import Accepted, Busy
from engine.base import EngineError
from engine.progress import Progress
from engine.stall_watch import StallWatch
from prefill_worker.held import HeldJob, HeldJobs
from prefill_worker.leases import LeaseKeeper
from prefill_worker.metrics import PrefillMetrics
from tests.broker.stores import eventually, job, take_one
from tests.workers import decode_world as d
from tests.workers import prefill_world as p
from tests.workers.live_engine import LiveEngine

STALL_S = 2.0
"""Longer than a look at the engine may be late without an excuse: a busy machine's pauses are none of the engine's."""


async def beating(engine: LiveEngine) -> None:
    """As an engine that lives, until it hangs."""
    while True:
        engine.say(running=0)
        await asyncio.sleep(0.1)


async def until_accepted(world: d.World, request_id: str) -> None:
    """Busy once more: its beats came late."""

    async def is_accepted() -> bool:
        answer = await world.start(request_id)
        assert isinstance(answer, Accepted | Busy)
        return isinstance(answer, Accepted)

    await eventually(is_accepted)


async def test_a_decode_worker_fails_what_its_engine_hangs_with_and_takes_nothing_new() -> None:
    async with d.decode_world(decode_stall_s=STALL_S) as world:
        beats = asyncio.create_task(beating(world.engine))
        await until_accepted(world, "r")
        world.engine.token(world.engine.submitted[0], 7)
        await world.until(lambda: len(world.deltas) == 1)

        world.engine.is_hung = True

        await world.until(lambda: len(world.failed) == 1)
        failed = world.failed[0]
        assert (failed.request_id, failed.code, failed.retryable) == ("r", "engine_stalled", True)
        assert world.engine.aborted == [world.engine.submitted[0].engine_request_id]
        await eventually(lambda: _is_in_state(world, "stalled"))
        assert isinstance(await world.start("new"), Busy)
        await world.until(lambda: world.lists[-1:] == [()])

        world.engine.is_hung = False

        await eventually(lambda: _is_in_state(world, "ready"))
        await until_accepted(world, "new")
        beats.cancel()
        world.engine.free(world.engine.submitted[-1].engine_request_id)
        world.engine.token(world.engine.submitted[-1], 7, finish="stop")


async def test_a_decode_worker_whose_engine_hangs_for_good_leaves_with_a_fault() -> None:
    async with d.decode_world(decode_stall_s=STALL_S, stall_exit_s=STALL_S) as world:
        world.engine.is_hung = True

        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(world.running, 30)

        assert caught.group_contains(EngineError, match="no progress")
        assert await world.state() == ""
        assert isinstance(await world.start("late"), Busy), "its inbox may be open a little longer"


async def test_a_prefill_worker_whose_engine_hangs_gives_its_jobs_back_and_leaves_with_a_fault() -> None:
    engine = LiveEngine(prefills=False)
    async with p.prefill_world(engine=engine, prefill_stall_s=STALL_S, stall_exit_s=STALL_S) as world:
        beats = asyncio.create_task(beating(engine))
        await world.queue.enqueue(job("r", gateway=world.endpoint))
        await world.until(lambda: len(engine.submitted) == 1)

        engine.is_hung = True

        await world.until(lambda: world.state("r") == "queued")
        assert world.queue.failures_of("r", 1) == 1
        await world.until(lambda: world.worker.record().state == "stalled")
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(world.running, 30)
        beats.cancel()

    assert caught.group_contains(EngineError, match="no progress")
    assert world.state("r") == "queued"
    assert "prefill-1" not in {worker.worker_id for worker in await world.registry.workers()}


def test_time_in_which_the_worker_itself_was_stopped_is_not_held_against_its_engine() -> None:
    stalls: list[str] = []
    progress = Progress(0.0, stall_s=5.0)
    watch = StallWatch(progress, exit_s=5.0, clock=lambda: 0.0, on_stall=lambda: stalls.append("told"))

    watch.look(100.0)  # SIGCONT after a long stop
    assert stalls == []

    for now in range(101, 111):
        watch.look(now)
    assert stalls == ["told"], "an engine that says nothing after that hangs"
    with pytest.raises(EngineError, match="no progress for 11 s"):
        watch.look(111.0)


class CountedQueue(MemoryQueue):
    num_renewals = 0

    async def renew(self, leases: tuple[JobLease, ...]) -> tuple[bool, ...]:
        self.num_renewals += 1
        return await super().renew(leases)


async def test_a_worker_that_was_stopped_renews_its_jobs_and_does_not_blame_them_on_its_engine() -> None:
    """Whichever looks first when it wakes up: the renewal, or the watch over the engine."""
    queue, held_jobs, now = CountedQueue(QueueSettings()), HeldJobs(), 0.0
    await queue.enqueue(job("r"))
    held_jobs.add(HeldJob(lease=await take_one(queue), taken_at=now))
    keeper = LeaseKeeper(
        queue=queue,
        held_jobs=held_jobs,
        progress=Progress(now, stall_s=10.0),
        lease_s=0.3,
        metrics=PrefillMetrics(CollectorRegistry()),
        on_dead=lambda dead: None,
        clock=lambda: now,
        rng=random.Random(1),
    )
    renewing = asyncio.create_task(keeper.run_renewals())
    await asyncio.sleep(0)

    now = 100.0  # SIGCONT after a long stop

    async def has_looked() -> bool:
        return queue.num_renewals > 0 or queue.state_of("r", 1) != "prefill"

    await eventually(has_looked)
    renewing.cancel()
    assert (queue.state_of("r", 1), queue.failures_of("r", 1)) == ("prefill", 0)


async def _is_in_state(world: d.World, state: str) -> bool:
    return await world.state() == state
