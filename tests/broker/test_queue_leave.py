"""A worker's name in the queue's group: it comes with the first job and goes with the worker, never with a job."""

from __future__ import annotations

from broker.base import WorkerRecord
from broker.redis_replies import fields
from tests.broker.stores import MODEL, RedisStore, Store, eventually, job, take_one


async def consumers(store: RedisStore) -> set[str]:
    found = await store.calls.call("XINFO", "CONSUMERS", store.queue.keys.stream, "prefill")
    return {fields(raw)["name"] for raw in found} - {"-"}


async def test_an_owner_that_holds_a_job_keeps_its_name_and_its_job(store: Store) -> None:
    await store.queue.enqueue(job("r1"))
    lease = await take_one(store.queue, "p1")

    is_gone = await store.queue.leave("p1")

    assert not is_gone
    assert await store.queue.settle(lease, state="decode")
    assert await store.queue.leave("p1")


async def test_leaving_is_harmless_for_strangers_and_for_an_empty_store(store: Store) -> None:
    assert await store.queue.leave("p1")
    await store.queue.enqueue(job("r1"))
    assert await store.queue.leave("p1")

    assert (await take_one(store.queue, "p2")).job.request_id == "r1"


async def test_an_owner_may_come_back_after_it_left(store: Store) -> None:
    await store.queue.enqueue(job("r1"))
    await store.queue.give_back(await take_one(store.queue, "p1"), failure=None)
    await store.queue.leave("p1")

    lease = await take_one(store.queue, "p1")

    assert await store.queue.renew((lease,)) == (True,)


async def test_who_left_is_no_consumer_any_more(redis_store: RedisStore) -> None:
    await redis_store.queue.enqueue(job("r1"))
    lease = await take_one(redis_store.queue, "p1")
    before = await consumers(redis_store)
    await redis_store.queue.settle(lease, state="decode")

    await redis_store.queue.leave("p1")

    assert (before, await consumers(redis_store)) == ({"p1"}, set())


async def test_leaving_an_empty_store_makes_no_key(redis_store: RedisStore) -> None:
    await redis_store.queue.leave("p1")

    assert await redis_store.calls.call("EXISTS", redis_store.queue.keys.stream) == 0


async def test_reaping_forgets_the_killed_but_not_the_idle(redis_store: RedisStore) -> None:
    for owner in ("alive", "killed"):
        await redis_store.queue.enqueue(job())
        await redis_store.queue.settle(await take_one(redis_store.queue, owner), state="decode")
    record = WorkerRecord(worker_id="alive", role="prefill", state="ready", endpoint="", model=MODEL, fingerprint="")
    await redis_store.registry.heartbeat(record)

    async def only_the_idle_one_is_left() -> bool:
        await redis_store.set_clock(last_ago_s=0, since_ago_s=600)
        await redis_store.expire_leases()
        return await consumers(redis_store) == {"alive"}

    await eventually(only_the_idle_one_is_left)


async def test_depth_counts_tokens(store: Store) -> None:
    for name, tokens in (("a", 5), ("b", 7), ("c", 11)):
        await store.queue.enqueue(job(name, tokens=tokens))
    await take_one(store.queue)

    depth = await store.queue.depth()

    assert (depth.queued, depth.running) == (2, 1)
    assert (depth.queued_tokens, depth.running_tokens) == (18, 5)


async def test_tokens_of_a_long_queue_are_estimated(redis_store: RedisStore) -> None:
    for _ in range(600):
        await redis_store.queue.enqueue(job(tokens=4))
    await redis_store.queue.take("p1", max_tokens=10**6, max_jobs=10)

    depth = await redis_store.queue.depth()

    assert (depth.queued_tokens, depth.running_tokens) == (590 * 4, 40)
