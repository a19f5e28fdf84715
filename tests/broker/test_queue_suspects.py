"""A job that failed before may be what brings workers down: nobody may fail along with it."""

from __future__ import annotations

from tests.broker.stores import Store, job, take_one

ANY = 10**9


async def names(store: Store, owner: str = "p2", *, is_idle: bool = True) -> list[str]:
    taken = await store.queue.take(owner, max_tokens=ANY, max_jobs=8, is_idle=is_idle)
    return [lease.job.request_id for lease in taken.leases]


async def test_a_job_that_failed_is_taken_alone_from_then_on(store: Store) -> None:
    for name in ("before", "failed", "after"):
        await store.queue.enqueue(job(name))
    leases = (await store.queue.take("p1", max_tokens=ANY, max_jobs=8)).leases
    for lease in leases:
        await store.queue.give_back(lease, failure="crash" if lease.job.request_id == "failed" else None)

    assert [await names(store) for _ in range(3)] == [["before"], ["failed"], ["after"]]


async def test_so_is_one_whose_worker_died(store: Store) -> None:
    for name in ("a", "b"):
        await store.queue.enqueue(job(name))
    await store.queue.take("p1", max_tokens=ANY, max_jobs=8)
    await store.expire_leases()

    assert [await names(store) for _ in range(2)] == [["a"], ["b"]]


async def test_a_worker_that_computes_something_leaves_it_and_hears_that_more_is_waiting(store: Store) -> None:
    for name in ("failed", "after"):
        await store.queue.enqueue(job(name))
    await store.queue.give_back(await take_one(store.queue), failure="crash")

    busy = await store.queue.take("p2", max_tokens=ANY, max_jobs=8, is_idle=False)

    assert (busy.leases, busy.is_more_waiting) == ((), True)
    assert await names(store) == ["failed"]
    assert await names(store, is_idle=False) == ["after"]


async def test_giving_back_without_a_failure_makes_no_job_suspect(store: Store) -> None:
    for name in ("a", "b"):
        await store.queue.enqueue(job(name))
    await store.queue.give_back(await take_one(store.queue), failure=None)

    assert await names(store, is_idle=False) == ["a", "b"]


async def test_failures_of_lower_gens_count_on(store: Store) -> None:
    await store.queue.enqueue(job("r", gen=3, failures=2))
    await store.queue.enqueue(job("after"))

    taken = await store.queue.take("p1", max_tokens=ANY, max_jobs=8)
    (lease,) = taken.leases
    dead = await store.queue.give_back(lease, failure="crash")

    assert (lease.job.request_id, lease.failures) == ("r", 2)
    assert dead is not None
    assert dead.reason == "max_attempts"
