"""Cancelling and sleeping, on every store."""

from __future__ import annotations

import asyncio

import pytest

from tests.broker.stores import LIMIT_S, Store, job, take_one

ANY = 10**9


async def test_cancel_of_a_queued_job_removes_it(store: Store) -> None:
    await store.queue.enqueue(job("r1"))

    owner = await store.queue.cancel("r1", 1)

    assert owner is None
    assert (await store.queue.take("p1", max_tokens=ANY, max_jobs=1)).leases == ()
    assert await store.leftovers() == (0, 0, 0)


async def test_cancel_of_a_running_job_names_its_owner_whose_lease_is_lost(store: Store) -> None:
    await store.queue.enqueue(job("r1"))
    lease = await take_one(store.queue, "p1")

    owner = await store.queue.cancel("r1", 1)

    assert owner == "p1"
    assert await store.queue.renew((lease,)) == (False,)
    assert not await store.queue.settle(lease, state="decode")
    assert await store.queue.give_back(lease, failure=None) is None
    assert await store.state("r1") == "cancelled"
    assert await store.leftovers() == (0, 0, 0)


async def test_cancel_beats_an_enqueue_that_comes_after_it(store: Store) -> None:
    assert await store.queue.cancel("r1", 1) is None

    assert await store.queue.enqueue(job("r1", gen=1)) is None
    assert await store.queue.enqueue(job("r1", gen=2)) is not None
    assert (await store.queue.depth()).queued == 1


async def test_cancel_after_the_end_changes_nothing(store: Store) -> None:
    await store.queue.enqueue(job("r1"))
    await store.queue.settle(await take_one(store.queue), state="decode")

    assert await store.queue.cancel("r1", 1) is None
    assert await store.state("r1") == "decode"


@pytest.mark.parametrize("how", ["enqueue", "give back", "reap"])
async def test_a_sleeping_worker_wakes_when_work_comes_or_comes_back(store: Store, how: str) -> None:
    lease = None
    if how != "enqueue":
        await store.queue.enqueue(job("r1"))
        lease = await take_one(store.queue, "p0")
    assert (await store.queue.take("p1", max_tokens=ANY, max_jobs=1)).leases == ()
    sleeper = asyncio.create_task(store.queue.wait(LIMIT_S))
    assert not await store.queue.wait(0.03)

    if how == "enqueue":
        await store.queue.enqueue(job("r1"))
    elif how == "give back":
        assert lease is not None
        await store.queue.give_back(lease, failure=None)
    else:
        await store.expire_leases()

    assert await sleeper
    assert (await take_one(store.queue, "p1")).job.request_id == "r1"


async def test_nothing_is_missed_between_an_empty_take_and_the_sleep(store: Store) -> None:
    await store.queue.take("p1", max_tokens=ANY, max_jobs=1)
    await store.queue.enqueue(job("r1"))

    assert await store.queue.wait(LIMIT_S)


async def test_a_take_that_left_jobs_does_not_sleep(store: Store) -> None:
    await store.queue.enqueue(job("r1"))
    await store.queue.enqueue(job("r2"))
    await store.queue.take("p1", max_tokens=ANY, max_jobs=1)

    assert await store.queue.wait(LIMIT_S)
