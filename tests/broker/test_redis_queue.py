"""What only shows in Redis itself: keys, TTLs, lost data, full memory, large numbers."""

from __future__ import annotations

import asyncio

import pytest
from redis.crc import key_slot

from broker.base import JobFate
from broker.errors import QueueUnavailable
from broker.redis_queue import RedisPrefillQueue
from broker.redis_replies import fields, text
from tests.broker.stores import MODEL, RedisStore, eventually, job, real_calls, take_one
from tests.servers import RedisServer

ANY = 10**9


async def test_live_keys_have_no_ttl_and_ended_ones_do(redis_store: RedisStore) -> None:
    queue, call, keys = redis_store.queue, redis_store.calls.call, redis_store.queue.keys
    await queue.enqueue(job("r1"))
    lease = await take_one(queue)
    live = [await call("PTTL", keys.req("r1", 1)), await call("PTTL", keys.job("r1", 1))]

    await queue.settle(lease, state="decode")
    await queue.cancel("r2", 1)

    assert live == [-1, -1]
    assert await call("EXISTS", keys.job("r1", 1)) == 0
    assert 0 < await call("PTTL", keys.req("r1", 1)) <= 120_000
    assert 0 < await call("PTTL", keys.req("r2", 1)) <= 120_000


async def test_a_dead_letter_keeps_its_payload_for_a_while_and_their_number_is_bounded(redis_store: RedisStore) -> None:
    queue = redis_store.other(max_failures=1, max_dead_letters=2)
    for number in range(4):
        await queue.enqueue(job(f"r{number}"))
        await queue.give_back(await take_one(queue, "p9"), failure="boom")

    letters = await redis_store.calls.call("XRANGE", queue.keys.dead, "-", "+")

    last = fields(letters[-1][1])
    assert len(letters) == 2
    assert {name: last[name] for name in ("id", "gen", "reason", "attempts", "worker", "error")} == {
        "id": "r3",
        "gen": "1",
        "reason": "max_attempts",
        "attempts": "1",
        "worker": "p9",
        "error": "boom",
    }
    assert 0 < await redis_store.calls.call("PTTL", queue.keys.job("r3", 1)) <= 3_600_000


async def test_stream_entry_and_request_hash_are_readable_text(redis_store: RedisStore) -> None:
    queue, call = redis_store.queue, redis_store.calls.call
    await queue.enqueue(job("r1", tokens=12, tenant="acme"))
    lease = await take_one(queue, "p1")

    ((_, raw),) = await call("XRANGE", queue.keys.stream, "-", "+")
    request = fields(await call("HGETALL", queue.keys.req("r1", 1)))

    entry = fields(raw)
    assert (entry["id"], entry["gen"], entry["tokens"], entry["mode"], entry["tenant"]) == (
        "r1",
        "1",
        "12",
        "pull",
        "acme",
    )
    assert float(entry["deadline"]) - float(entry["due"]) > 500_000
    assert (request["state"], request["worker"], request["attempt"]) == ("prefill", "p1", "1")
    assert request["entry"] == lease.entry_id
    assert int(request["enqueued"]) <= int(request["taken"])


async def test_all_keys_of_a_model_share_one_cluster_slot(redis_store: RedisStore) -> None:
    queue = redis_store.other(max_failures=1)
    for name in ("r1", "r2"):
        await queue.enqueue(job(name, tenant="t"))
    await queue.give_back(await take_one(queue), failure="boom")
    await redis_store.expire_leases()

    found = {text(key) for key in await redis_store.calls.call("KEYS", "*")} - {"pdq:models"}

    assert len(found) >= 7
    assert len({key_slot(key.encode()) for key in found}) == 1
    assert all(key.startswith(f"pdq:{{{MODEL}}}:") for key in found)


@pytest.mark.parametrize("model", ["", "a{b", "a}b", "a b"])
def test_a_model_name_that_breaks_the_hash_tag_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match="model name"):
        RedisPrefillQueue(object(), model, object())  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["job", "req"])
async def test_a_job_whose_data_is_gone_becomes_a_dead_letter(redis_store: RedisStore, which: str) -> None:
    queue = redis_store.queue
    await queue.enqueue(job("r1"))
    await queue.enqueue(job("fine", tokens=50))
    await redis_store.calls.call("DEL", getattr(queue.keys, which)("r1", 1))

    taken = await queue.take("p1", max_tokens=ANY, max_jobs=4)

    assert [(dead.request_id, dead.reason) for dead in taken.dead] == [("r1", "payload_lost")]
    assert [lease.job.request_id for lease in taken.leases] == ["fine"]
    assert await redis_store.calls.call("XLEN", queue.keys.dead) == 1


async def test_a_payload_that_nobody_can_read_becomes_a_dead_letter_at_once(redis_store: RedisStore) -> None:
    queue = redis_store.queue
    await queue.enqueue(job("r1"))
    await redis_store.calls.call("SET", queue.keys.job("r1", 1), b"\xc1 not a job")

    taken = await queue.take("p1", max_tokens=ANY, max_jobs=4)

    assert taken.leases == ()
    assert [(dead.request_id, dead.reason, str(dead.pair)) for dead in taken.dead] == [("r1", "payload_invalid", "1.1")]
    assert await redis_store.leftovers() == (0, 0, 0)


async def test_many_hopeless_jobs_do_not_hide_the_one_behind_them(redis_store: RedisStore) -> None:
    queue = redis_store.other(take_scan_max=10)
    await asyncio.gather(*(queue.enqueue(job(deadline_s=0.0)) for _ in range(55)))
    await queue.enqueue(job("fine", tokens=50))

    taken = await queue.take("p1", max_tokens=ANY, max_jobs=4)

    assert len(taken.dead) == 55
    assert [lease.job.request_id for lease in taken.leases] == ["fine"]


async def test_scripts_are_loaded_again_when_the_server_forgot_them(redis_store: RedisStore) -> None:
    await redis_store.queue.enqueue(job("r1"))
    await redis_store.calls.call("SCRIPT", "FLUSH")

    lease, _ = await asyncio.gather(take_one(redis_store.queue), redis_store.queue.enqueue(job("r2", tokens=50)))
    await redis_store.calls.call("SCRIPT", "FLUSH")

    assert await redis_store.queue.settle(lease, state="decode")


async def test_the_group_is_made_again_when_it_was_destroyed(redis_store: RedisStore) -> None:
    queue = redis_store.queue
    await queue.enqueue(job("r1"))
    await queue.enqueue(job("r2", tokens=50))
    lease = await take_one(queue)
    await redis_store.calls.call("XGROUP", "DESTROY", queue.keys.stream, "prefill")

    assert await queue.renew((lease,)) == (False,)
    assert (await take_one(queue)).job.request_id == "r2"


async def test_after_a_flush_everything_works_and_the_loss_can_be_seen(redis_store: RedisStore) -> None:
    queue = redis_store.queue
    await queue.enqueue(job("r1"))
    lease = await take_one(queue)
    await redis_store.calls.call("FLUSHALL")

    assert await queue.renew((lease,)) == (False,)
    assert await queue.fates((("r1", 1),)) == (JobFate(state="lost"),)
    assert (await queue.reap()).dead == ()
    assert (await queue.depth()).queued == 0
    await queue.enqueue(job("r1", gen=2))
    assert (await take_one(queue)).pair.gen == 2


@pytest.mark.parametrize("key", ["stream", "ready"])
async def test_a_job_of_which_only_half_is_there_is_lost(redis_store: RedisStore, key: str) -> None:
    queue = redis_store.queue
    await queue.enqueue(job("taken"))
    await take_one(queue)
    await queue.enqueue(job("waits"))
    await redis_store.calls.call("DEL", getattr(queue.keys, key))

    fates = await queue.fates((("taken", 1), ("waits", 1)))

    assert [fate.state for fate in fates] == ["lost" if key == "stream" else "prefill", "lost"]


async def test_a_cancelled_take_gives_its_jobs_back(redis_store: RedisStore) -> None:
    queue = redis_store.queue
    await queue.enqueue(job("r1"))
    sent = asyncio.Event()

    async def taker() -> None:
        task = asyncio.create_task(queue.take("p1", max_tokens=ANY, max_jobs=1))
        await asyncio.sleep(0)  # the take has put its call on the list
        task.cancel()
        sent.set()

    await taker()
    await sent.wait()

    async def is_back() -> bool:
        depth = await queue.depth()
        return (depth.queued, depth.running) == (1, 0)

    await eventually(is_back)
    assert (await take_one(queue)).failures == 0


async def test_names_of_idle_consumers_are_dropped_but_never_with_pending_jobs(redis_store: RedisStore) -> None:
    queue = redis_store.other(consumer_idle_s=0.0, lease_s=60.0)
    for name in ("r1", "r2"):
        await queue.enqueue(job(name))
    await queue.settle(await take_one(queue, "idle"), state="decode")
    busy = await take_one(queue, "busy")

    async def only_busy() -> bool:
        await redis_store.set_clock(last_ago_s=0, since_ago_s=600)
        await queue.reap()
        found = await redis_store.calls.call("XINFO", "CONSUMERS", queue.keys.stream, "prefill")
        return {fields(raw)["name"] for raw in found} - {"-"} == {"busy"}

    await eventually(only_busy)
    assert await queue.renew((busy,)) == (True,)


async def test_renewed_leases_stay_and_the_silent_ones_behind_them_are_all_reaped(redis_server: RedisServer) -> None:
    store = RedisStore("redis", await real_calls(redis_server.url))
    queue = store.other(lease_s=60.0, reap_batch=10, take_scan_max=300)
    await asyncio.gather(*(queue.enqueue(job(f"kept{number}", priority=1)) for number in range(200)))
    await asyncio.gather(*(queue.enqueue(job(f"lost{number}")) for number in range(300)))
    lost = (await queue.take("silent", max_tokens=ANY, max_jobs=300)).leases
    kept = (await queue.take("busy", max_tokens=ANY, max_jobs=200)).leases
    assert (len(lost), len(kept)) == (300, 200)
    for owner, leases in (("silent", lost), ("busy", kept)):  # as if neither had renewed for an hour
        claim = ("XCLAIM", queue.keys.stream, "prefill", owner, 0, *(lease.entry_id for lease in leases))
        await store.calls.call(*claim, "IDLE", 3_600_000, "JUSTID")

    async def all_silent_ones_are_back() -> bool:
        await store.set_clock(last_ago_s=0, since_ago_s=600)
        assert all(await queue.renew(kept))
        await queue.reap()
        return (await queue.depth()).queued == 300

    await eventually(all_silent_ones_are_back)
    assert (await queue.depth()).running == 200
    await store.close()


async def test_ten_thousand_expired_leases_are_reaped_in_bounded_calls(redis_server: RedisServer) -> None:
    store = RedisStore("redis", await real_calls(redis_server.url))
    queue = store.other(lease_s=0.0, reap_calls_max=60)
    for _ in range(10):
        await asyncio.gather(*(queue.enqueue(job(tokens=1)) for _ in range(1000)))
    for _ in range(10):
        await queue.take("p1", max_tokens=ANY, max_jobs=1000)

    rounds = 0
    while (await queue.depth()).running:
        await queue.reap()
        rounds += 1

    assert rounds <= 3
    assert await store.leftovers() == (10_000, 0, 10_000)
    await store.close()


async def test_a_full_redis_refuses_new_jobs_whole_and_lets_running_ones_end(redis_server: RedisServer) -> None:
    store = RedisStore("redis", await real_calls(redis_server.url))
    queue, call = store.queue, store.calls.call
    for name in ("r1", "r2", "r3"):
        await queue.enqueue(job(name))
    lease = await take_one(queue)
    await call("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(QueueUnavailable, match="Redis is full"):
            await queue.enqueue(job("r4"))
        assert await queue.renew((lease,)) == (True,)
        assert await queue.settle(lease, state="decode")
        assert await queue.give_back(await take_one(queue), failure="boom") is None
        await queue.reap()
        await queue.cancel("r3", 1)
    finally:
        await call("CONFIG", "SET", "maxmemory", "0")

    assert await queue.fates((("r4", 1),)) == (JobFate(state="lost"),)
    assert await call("EXISTS", queue.keys.job("r4", 1)) == 0
    assert await store.leftovers() == (1, 0, 1)
    await store.close()
