"""One job from lease to settlement: what happens to the KV whatever the other sides say."""

from __future__ import annotations

import pytest

from broker.delivery import QueueSettings
from broker.memory import MemoryQueue
from broker.messages import Accepted, Busy, Gone
from prefill_worker.held import JobOutcome
from tests.workers.job_world import DeadEngine, World


async def test_accepted_settles_the_job_and_leaves_the_kv_to_its_reader() -> None:
    world = World(MemoryQueue(QueueSettings()), Accepted)

    await world.run()

    assert (await world.queue.depth()).running == 0
    assert world.engine.released == world.engine.aborted == []


async def test_gone_settles_the_job_and_releases_the_kv() -> None:
    world = World(MemoryQueue(QueueSettings()), Gone)

    held = await world.run()

    assert (await world.queue.depth()).running == 0
    assert world.engine.released == [held.engine_request_id]


async def test_with_every_decode_worker_busy_the_job_goes_back_without_a_failure_and_its_kv_is_released() -> None:
    world = World(MemoryQueue(QueueSettings()), Busy)

    held = await world.run()

    (again,) = (await world.queue.take("prefill-2", max_tokens=100, max_jobs=1)).leases
    assert (again.failures, again.pair.attempt) == (0, 2)
    assert world.engine.released == [held.engine_request_id]


@pytest.mark.parametrize("error", ["engine_error: out of memory", "kv_transfer_failed: gone"])
async def test_an_engine_failure_gives_the_job_back_as_a_failure(error: str) -> None:
    world = World(MemoryQueue(QueueSettings()), Accepted)

    await world.run(error=error)

    (again,) = (await world.queue.take("prefill-2", max_tokens=100, max_jobs=1)).leases
    assert again.failures == 1
    assert world.engine.released == world.engine.aborted == []


async def test_an_engine_that_has_just_died_gives_the_job_back_at_once() -> None:
    world = World(MemoryQueue(QueueSettings()), Accepted)
    world.engine = DeadEngine()

    held = await world.run()

    assert held.outcome is JobOutcome.FAILED
    (again,) = (await world.queue.take("prefill-2", max_tokens=100, max_jobs=1)).leases
    assert again.failures == 1


async def test_an_engine_that_dies_while_no_decode_worker_has_room_is_no_crash_of_the_job() -> None:
    world = World(MemoryQueue(QueueSettings()), Busy)
    world.engine = DeadEngine(dies_after_submit=True)

    held = await world.run()

    assert held.outcome is JobOutcome.NO_ROOM


async def test_a_decode_worker_that_does_not_fit_is_never_asked() -> None:
    world = World(MemoryQueue(QueueSettings()), Accepted, fingerprint="dtype=bfloat16")

    held = await world.run()

    assert world.offers == []
    assert held.outcome is JobOutcome.NO_ROOM
    assert (await world.queue.depth()).queued == 1
    assert world.engine.released == [held.engine_request_id]


@pytest.mark.parametrize(
    ("answer", "error", "outcome"),
    [
        (Accepted, None, JobOutcome.HANDED_OVER),
        (Gone, None, JobOutcome.GONE),
        (Busy, None, JobOutcome.NO_ROOM),
        (Accepted, "engine_error: out of memory", JobOutcome.FAILED),
    ],
)
async def test_a_job_says_how_it_left_the_worker(
    answer: type[Accepted] | type[Busy] | type[Gone], error: str | None, outcome: JobOutcome
) -> None:
    held = await World(MemoryQueue(QueueSettings()), answer).run(error=error)

    assert held.outcome is outcome
