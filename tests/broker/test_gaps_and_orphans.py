"""Who counts as dead: nobody just after Redis itself was away; a gateway only when its heartbeat stopped."""

from __future__ import annotations

from broker.base import WorkerRecord
from broker.redis_registry import RedisRegistry
from broker.registry_settings import RegistrySettings
from tests.broker.stores import MODEL, TTL_S, RedisStore, Store, eventually, job, take_one

ANY = 10**9


def record(worker_id: str = "prefill-a", **changes: object) -> WorkerRecord:
    values: dict[str, object] = {
        "worker_id": worker_id,
        "role": "prefill",
        "state": "ready",
        "endpoint": "tcp://127.0.0.1:9",
        "model": MODEL,
        "fingerprint": "layers=4 dtype=float32",
    }
    return WorkerRecord(**(values | changes))  # type: ignore[arg-type]


async def _silence(store: RedisStore, owner: str, entry_id: str) -> None:
    """As if the owner had not renewed for an hour."""
    await store.calls.call(
        "XCLAIM", store.queue.keys.stream, "prefill", owner, 0, entry_id, "IDLE", 3_600_000, "JUSTID"
    )


async def test_after_a_gap_nothing_is_reaped_for_one_lease(redis_store: RedisStore) -> None:
    queue = redis_store.other(lease_s=60.0)
    await queue.enqueue(job("r1"))
    lease = await take_one(queue, "p1")
    await _silence(redis_store, "p1", lease.entry_id)

    await redis_store.set_clock(last_ago_s=30, since_ago_s=3600)
    await queue.reap()
    after_gap = await queue.depth()
    await redis_store.set_clock(last_ago_s=0, since_ago_s=5)
    await queue.reap()
    within_a_lease = await queue.depth()
    await redis_store.set_clock(last_ago_s=1, since_ago_s=61)
    await queue.reap()

    assert (after_gap.running, within_a_lease.running) == (1, 1)
    assert (await queue.depth()).queued == 1


async def test_a_clock_that_was_set_back_is_a_gap_and_passes(redis_store: RedisStore) -> None:
    queue = redis_store.queue
    await queue.enqueue(job("r1"))
    lease = await take_one(queue, "p1")
    await _silence(redis_store, "p1", lease.entry_id)
    await redis_store.set_clock(last_ago_s=-3600, since_ago_s=-1800)

    await queue.reap()
    clock = await redis_store.calls.call("HMGET", queue.keys.clock, "last", "since")

    assert (await queue.depth()).running == 1
    assert clock[0] == clock[1]


async def test_jobs_of_a_gateway_that_is_gone_end_at_the_take(redis_store: RedisStore) -> None:
    queue, keys = redis_store.queue, redis_store.queue.keys
    await queue.enqueue(job("orphan", gateway_id="gateway-gone"))
    await queue.enqueue(job("fine", gateway_id="gateway-here", tokens=50))
    await redis_store.registry.heartbeat(record("gateway-here", role="gateway"))
    await redis_store.calls.call("ZADD", keys.workers, 1, "gateway-gone")
    await redis_store.set_clock(last_ago_s=0, since_ago_s=60)

    taken = await queue.take("p1", max_tokens=ANY, max_jobs=4)

    assert [(dead.request_id, dead.reason, dead.gateway_id) for dead in taken.dead] == [
        ("orphan", "orphaned", "gateway-gone")
    ]
    assert [lease.job.request_id for lease in taken.leases] == ["fine"]


async def test_jobs_of_a_gateway_that_is_gone_end_at_the_renewal(redis_store: RedisStore) -> None:
    queue, keys = redis_store.queue, redis_store.queue.keys
    await queue.enqueue(job("orphan", gateway_id="gateway-gone"))
    await queue.enqueue(job("fine", gateway_id="gateway-here"))
    orphan, fine = await take_one(queue), await take_one(queue)
    await redis_store.registry.heartbeat(record("gateway-here", role="gateway"))
    await redis_store.calls.call("ZADD", keys.workers, 1, "gateway-gone")

    await redis_store.set_clock(last_ago_s=0, since_ago_s=0)
    after_gap = await queue.renew((orphan, fine))
    await redis_store.set_clock(last_ago_s=0, since_ago_s=60)
    is_kept = await queue.renew((orphan, fine))

    assert (after_gap, is_kept) == ((True, True), (False, True))
    assert await redis_store.state("orphan") == "orphaned"
    assert await redis_store.leftovers() == (1, 1, 0)
    assert not await redis_store.calls.call("EXISTS", keys.job("orphan", 1))


async def test_jobs_that_a_gateway_leaves_behind_when_it_ends_are_nobody_s_too(redis_store: RedisStore) -> None:
    """It could not take them out: Redis was away during its drain."""
    queue = redis_store.other(orphan_s=0.05)
    await queue.enqueue(job("left behind", gateway_id="gateway-a"))
    await redis_store.registry.heartbeat(record("gateway-a", role="gateway"))
    await redis_store.set_clock(last_ago_s=0, since_ago_s=60)
    await redis_store.registry.remove("gateway-a")

    async def is_over() -> bool:
        return bool((await queue.take("p1", max_tokens=0, max_jobs=1)).dead)

    await eventually(is_over)
    assert await redis_store.state("left behind") == "orphaned"
    assert await redis_store.registry.workers() == ()


async def test_no_gateway_is_gone_just_after_a_gap_or_when_it_never_registered(redis_store: RedisStore) -> None:
    queue, keys = redis_store.queue, redis_store.queue.keys
    await queue.enqueue(job("silent", gateway_id="gateway-silent"))
    await queue.enqueue(job("unknown", gateway_id="gateway-unknown", tokens=50))
    await redis_store.calls.call("ZADD", keys.workers, 1, "gateway-silent")
    await redis_store.set_clock(last_ago_s=0, since_ago_s=0)

    taken = await queue.take("p1", max_tokens=ANY, max_jobs=4)

    assert taken.dead == ()
    assert len(taken.leases) == 2


async def test_a_record_comes_back_as_it_was_written(store: Store) -> None:
    written = record("decode-a", role="decode", free_blocks=7, total_blocks=9, block_size=16, epoch="e", http="x:1")
    await store.registry.heartbeat(written)
    await store.registry.heartbeat(record("prefill-b"))

    found = {worker.worker_id: worker for worker in await store.registry.workers()}

    assert found == {"decode-a": written, "prefill-b": record("prefill-b")}


async def test_a_removed_process_is_not_listed(store: Store) -> None:
    await store.registry.heartbeat(record())

    await store.registry.remove("prefill-a")

    assert await store.registry.workers() == ()


async def test_a_process_hears_at_its_heartbeat_that_it_shall_drain(store: Store) -> None:
    before = await store.registry.heartbeat(record())
    asked = await store.registry.ask_to_drain("prefill-a")
    after = await store.registry.heartbeat(record())

    assert (before, asked, after) == (False, True, True)
    assert not await store.registry.ask_to_drain("nobody")


async def test_a_silent_process_leaves_the_list_after_its_ttl(redis_store: RedisStore) -> None:
    registry = RedisRegistry(redis_store.calls, MODEL, RegistrySettings(registry_ttl_s=0.1))
    await registry.heartbeat(record("silent"))

    async def only_the_other_is_left() -> bool:
        await registry.heartbeat(record("other"))
        return [worker.worker_id for worker in await registry.workers()] == ["other"]

    async def has_a_ttl() -> bool:
        await registry.heartbeat(record("other"))
        left_ms = await redis_store.calls.call("PTTL", registry.keys.worker("other"))
        assert left_ms <= 100
        return bool(left_ms > 0)  # else it is over already

    await eventually(only_the_other_is_left)
    await eventually(has_a_ttl)


async def test_after_a_gap_the_processes_known_before_stay_listed_for_one_ttl(redis_store: RedisStore) -> None:
    registry, keys = redis_store.registry, redis_store.queue.keys
    assert isinstance(registry, RedisRegistry)
    await registry.heartbeat(record("a"))
    await registry.heartbeat(record("b"))
    await registry.workers()
    await redis_store.calls.call("DEL", keys.worker("a"), keys.worker("b"), keys.workers)  # what a restart does

    await redis_store.set_clock(last_ago_s=30, since_ago_s=3600)
    await registry.heartbeat(record("b"))
    after_gap = {worker.worker_id for worker in await registry.workers()}
    await redis_store.set_clock(last_ago_s=0, since_ago_s=TTL_S + 2)

    assert after_gap == {"a", "b"}
    assert {worker.worker_id for worker in await registry.workers()} == {"b"}


async def test_a_record_of_an_unknown_version_is_left_out(redis_store: RedisStore) -> None:
    await redis_store.registry.heartbeat(record("a"))
    await redis_store.registry.heartbeat(record("b"))
    await redis_store.calls.call("HSET", redis_store.queue.keys.worker("a"), "free_blocks", "many")
    await redis_store.calls.call("HSET", redis_store.queue.keys.worker("b"), "field_of_a_newer_version", "x")

    assert [worker.worker_id for worker in await redis_store.registry.workers()] == ["b"]
    assert await redis_store.calls.call("SMEMBERS", "pdq:models") == [MODEL.encode()]
