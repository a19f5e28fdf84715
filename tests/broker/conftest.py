"""`store`: the same tests on the memory twin, fakeredis, Redis and Valkey. `redis_store`: without the twin."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.broker.stores import MemoryStore, RedisStore, Store, fake_calls, real_calls

_REDIS_KINDS = ["fakeredis", "redis", "valkey"]


@pytest.fixture(params=["memory", *_REDIS_KINDS])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    made = MemoryStore() if request.param == "memory" else await _redis_store(request)
    yield made
    await made.close()


@pytest.fixture(params=_REDIS_KINDS)
async def redis_store(request: pytest.FixtureRequest) -> AsyncIterator[RedisStore]:
    made = await _redis_store(request)
    yield made
    await made.close()


async def _redis_store(request: pytest.FixtureRequest) -> RedisStore:
    if request.param == "fakeredis":
        return RedisStore("fakeredis", fake_calls())
    server = request.getfixturevalue(f"{request.param}_server")
    return RedisStore(request.param, await real_calls(server.url))
