"""In which order jobs leave the queue, on every store."""

from __future__ import annotations

import asyncio

from tests.broker.stores import Store, job

ANY = 10**9


async def test_jobs_come_out_in_order_of_due_shorter_ones_first(store: Store) -> None:
    for name, tokens in (("long", 3000), ("short", 10), ("middle", 500)):
        await store.queue.enqueue(job(name, tokens=tokens))

    taken = await store.queue.take("p1", max_tokens=ANY, max_jobs=8)

    assert [lease.job.request_id for lease in taken.leases] == ["short", "middle", "long"]


async def test_an_estimated_time_counts_more_than_the_number_of_tokens(store: Store) -> None:
    for name, tokens, prefill_ms in (("slow", 10, 60_000.0), ("quick", 90_000, 40_000.0)):  # due a minute apart
        await store.queue.enqueue(job(name, tokens=tokens, prefill_ms=prefill_ms))

    taken = await store.queue.take("p1", max_tokens=ANY, max_jobs=8)

    assert [lease.job.request_id for lease in taken.leases] == ["quick", "slow"]


async def test_equal_jobs_come_out_in_order_of_arrival(store: Store) -> None:
    names = [f"r{number}" for number in range(30)]
    await asyncio.gather(*(store.queue.enqueue(job(name)) for name in names))

    taken = await store.queue.take("p1", max_tokens=ANY, max_jobs=100)

    assert [lease.job.request_id for lease in taken.leases] == names


async def test_a_lower_priority_number_goes_first(store: Store) -> None:
    for name, priority in (("late", 2), ("normal", 0), ("urgent", -1)):
        await store.queue.enqueue(job(name, priority=priority))

    taken = await store.queue.take("p1", max_tokens=ANY, max_jobs=3)

    assert [lease.job.request_id for lease in taken.leases] == ["urgent", "normal", "late"]


async def test_a_request_that_comes_back_keeps_its_place_and_its_tenant_does_not_pay_twice(store: Store) -> None:
    await store.queue.enqueue(job("rival", tokens=20_000, tenant="rival"))  # due after a minute
    await store.queue.enqueue(job("first", tokens=20_000, tenant="t"))
    await store.queue.enqueue(job("back", tokens=20_000, tenant="t", gen=2, waited_s=30.0))
    await store.queue.enqueue(job("second", tokens=20_000, tenant="t"))  # 20 s of virtual time after `first`
    await store.queue.enqueue(job("late", tokens=23_000))  # due 9 s after `rival`

    taken = await store.queue.take("p1", max_tokens=ANY, max_jobs=8)

    assert [lease.job.request_id for lease in taken.leases] == ["back", "rival", "first", "late", "second"]


async def test_a_flooding_tenant_falls_behind_a_quiet_one(store: Store) -> None:
    for number in range(5):
        await store.queue.enqueue(job(f"noisy{number}", tokens=20_000, tenant="noisy"))  # 20 s of its virtual time
    await store.queue.enqueue(job("quiet", tokens=20_000, tenant="quiet"))

    taken = await store.queue.take("p1", max_tokens=ANY, max_jobs=6)

    order = [lease.job.request_id for lease in taken.leases]
    assert order.index("quiet") <= 1
    assert [name for name in order if name != "quiet"] == [f"noisy{number}" for number in range(5)]
