"""kill -9 of Redis in the middle of things: with its AOF everything goes on by itself, without it the loss shows."""

from __future__ import annotations

import asyncio
import gc
import shutil

import pytest

from broker.base import JobFate, JobLease
from broker.errors import QueueUnavailable
from broker.redis_registry import RedisRegistry
from broker.redis_scale import RedisScale
from broker.registry_settings import RegistrySettings
from tests.broker.stores import LIMIT_S, RedisStore, eventually, job, real_calls
from tests.cli.operators import worker
from tests.servers import RedisServer

ANY = 10**9


async def test_after_a_restart_with_aof_leases_places_and_scripts_are_as_before(private_redis: RedisServer) -> None:
    store = RedisStore("redis", await real_calls(private_redis.url, redis_backoff_max_s=0.1))
    queue = store.queue
    names = [f"r{number:02}" for number in range(20)]
    for name in names:
        await queue.enqueue(job(name))
    running = (await queue.take("p1", max_tokens=ANY, max_jobs=5)).leases
    await queue.settle(running[0], state="decode")
    private_redis.kill()

    try:
        await queue.enqueue(job("while-down"))
        was_refused = False
    except QueueUnavailable:
        was_refused = True
    private_redis.start()
    await eventually(lambda: _answers(store))

    assert was_refused
    assert (await queue.reap()).dead == ()
    assert await queue.renew(running) == (False, True, True, True, True)
    rest = (await queue.take("p1", max_tokens=ANY, max_jobs=100)).leases
    assert [lease.job.request_id for lease in rest] == names[5:]
    for lease in (*running[1:], *rest):
        assert await queue.settle(lease, state="decode")
    assert await store.leftovers() == (0, 0, 0)
    await store.close()


async def test_a_sleeping_worker_survives_the_restart(private_redis: RedisServer) -> None:
    store = RedisStore("redis", await real_calls(private_redis.url, redis_backoff_max_s=0.1))
    await store.queue.take("p1", max_tokens=ANY, max_jobs=1)
    failures: list[str] = []

    async def worker() -> JobLease:
        while True:
            try:
                for lease in (await store.queue.take("p1", max_tokens=ANY, max_jobs=1)).leases:
                    return lease
                await store.queue.wait(LIMIT_S)
            except QueueUnavailable as exc:
                failures.append(str(exc))

    task = asyncio.create_task(worker())
    assert not await store.queue.wait(0.05)
    private_redis.kill()
    await eventually(lambda: _is_true(len(failures) > 0))
    private_redis.start()
    await eventually(lambda: _enqueues(store))

    assert (await task).job.request_id == "after"
    await store.close()


async def test_a_restart_without_data_is_seen_and_the_queue_goes_on(private_redis: RedisServer) -> None:
    store = RedisStore("redis", await real_calls(private_redis.url, redis_backoff_max_s=0.1))
    queue = store.queue
    await queue.enqueue(job("r1"))
    (lease,) = (await queue.take("p1", max_tokens=ANY, max_jobs=1)).leases
    private_redis.kill()
    shutil.rmtree(private_redis.folder / "appendonlydir")
    private_redis.start()
    await eventually(lambda: _answers(store))

    assert await queue.fates((("r1", 1),)) == (JobFate(state="lost"),)
    assert await queue.renew((lease,)) == (False,)
    await queue.enqueue(job("r1", gen=2))
    assert len((await queue.take("p1", max_tokens=ANY, max_jobs=1)).leases) == 1
    await store.close()


async def test_calls_that_go_together_fail_together_and_silently(private_redis: RedisServer) -> None:
    calls = await real_calls(private_redis.url, redis_backoff_max_s=0.1)
    registry, scale = RedisRegistry(calls, "m", RegistrySettings()), RedisScale(calls, "m", RegistrySettings())
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    private_redis.kill()

    for together in (registry.heartbeat(worker("prefill-1")), registry.remove("w1"), scale.leave("up")):
        with pytest.raises(QueueUnavailable):
            await together
    gc.collect()

    assert unheard == []
    await calls.close()


async def _answers(store: RedisStore) -> bool:
    try:
        await store.queue.depth()
    except QueueUnavailable:
        return False
    return True


async def _enqueues(store: RedisStore) -> bool:
    try:
        return await store.queue.enqueue(job("after")) is not None
    except QueueUnavailable:
        return False


async def _is_true(value: bool) -> bool:
    return value
