"""F25: between a gateway and Redis nothing passes for so long that its jobs count as orphans; then it heals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.conftest import ENVIRON
from tests.faults.tcp_proxy import TcpProxy
from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger
from tests.servers import RedisServer

ORPHAN_S = 2.0
NUM_WAITING = 14
"""One is prefilled per second: some of them must wait for longer than until they count as orphans."""
SLOW = {
    **ENVIRON,
    "PDQ_REDIS_TIMEOUT_S": "1",
    "PDQ_GATEWAY__QUEUE_TIMEOUT_S": "1",
    "PDQ_PREFILL_WORKER__ORPHAN_S": str(ORPHAN_S),
    "PDQ_PREFILL_WORKER__TAKE_TOKENS": "1",
    "PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "1000",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "20",
}


@dataclass(frozen=True, slots=True)
class Linked:
    """A deployment whose processes reach Redis by a proxy. Passes for a server."""

    link: TcpProxy

    @property
    def url(self) -> str:
        return f"redis://{self.link.host}:{self.link.port}/0"


@pytest.fixture
async def linked(tmp_path: Path, private_redis: RedisServer) -> AsyncIterator[tuple[Pipeline, TcpProxy]]:
    with TcpProxy(("127.0.0.1", private_redis.port)) as link:
        async with running(tmp_path, Linked(link), environ=SLOW) as pipeline:
            yield pipeline, link


async def test_a_gateway_that_is_cut_off_from_redis_loses_nothing_and_says_so_to_those_that_come(
    linked: tuple[Pipeline, TcpProxy],
) -> None:
    pipeline, link = linked
    ledger, refused = Ledger(pipeline.client), Ledger(pipeline.client)
    asking = [asyncio.create_task(ledger.ask(f"{n} streams " * 40, max_tokens=300, stream=True)) for n in range(2)]
    await _under_way(ledger)
    asking += [asyncio.create_task(ledger.ask(f"{n} waits " * 40, stream=n % 2 == 0)) for n in range(NUM_WAITING)]
    await _in_queue(pipeline, NUM_WAITING - 3)
    await _heard(pipeline)

    gateway = pipeline.child("gateway-1").pid
    link.stall(pid=gateway)
    await asyncio.gather(*(refused.ask(f"{n} comes now " * 40, stream=n % 2 == 0) for n in range(4)))
    await _orphans(pipeline)
    link.heal()
    await asyncio.gather(*asking)

    ledger.all_right()
    refused.all_truthful("queue_unavailable")
    assert not any(line.is_right for line in refused.lines)
    await asyncio.gather(*(ledger.ask(f"{n} afterwards " * 20) for n in range(2)))
    ledger.all_right()
    await pipeline.quiet()


async def _under_way(ledger: Ledger) -> None:
    async def too_short() -> str:
        shortest = min((len(line.text) for line in ledger.lines), default=0)
        return "" if shortest else "no text yet"

    await eventually(too_short, limit_s=60, what="streams under way")


async def _in_queue(pipeline: Pipeline, count: int) -> None:
    async def too_few() -> str:
        queued = await pipeline.redis.zcard(pipeline.key("ready"))
        return "" if queued >= count else f"{queued} are queued"

    await eventually(too_few, limit_s=60, what="queued jobs")


async def _heard(pipeline: Pipeline) -> None:
    """Waits until the gateway knows what the queue has taken: for two heartbeats, of which the second is not sent
    before the answers to what went with the first one were read.
    """
    (gateway,) = (name for name, record in (await pipeline.workers()).items() if record["role"] == "gateway")
    for _ in range(2):
        before = await pipeline.redis.zscore(pipeline.key("workers"), gateway)

        async def silent(before: float = before) -> str:
            last = await pipeline.redis.zscore(pipeline.key("workers"), gateway)
            return "" if last > before else "no heartbeat"

        await eventually(silent, limit_s=60, what="heartbeat of the gateway")


async def _orphans(pipeline: Pipeline) -> None:
    """Waits until the queue has given up jobs of a gateway that it doesn't hear of."""

    async def none() -> str:
        states = [await pipeline.redis.hget(key, "state") async for key in pipeline.redis.scan_iter("*:req:*")]
        return "" if b"orphaned" in states else f"states {states}"

    await eventually(none, limit_s=60, what="orphaned jobs")
