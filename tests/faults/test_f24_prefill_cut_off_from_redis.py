"""F24: between a prefill worker and Redis nothing passes for longer than a lease, then all that waited does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.faults.conftest import RECOVERY_S
from tests.faults.invariants import request_hashes
from tests.faults.stage import Stage
from tests.faults.tcp_proxy import TcpProxy
from tests.pipeline.harness import Pipeline, eventually
from tests.pipeline.ledger import Ledger

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.push_suffices]
SLOW = ("--sim-prefill-ms", "4000")
"""Longer than a lease: what it has computed by then is another one's."""


@pytest.fixture
def redis_link(pipeline: Pipeline) -> Iterator[TcpProxy]:
    port = int(pipeline.deployment.redis_url.rpartition(":")[2].partition("/")[0])
    with TcpProxy(("127.0.0.1", port)) as proxy:
        yield proxy


async def test_a_prefill_worker_that_is_cut_off_from_redis_past_its_leases_does_no_harm(
    redis_link: TcpProxy, stage: Stage, ledger: Ledger
) -> None:
    behind = ("--redis", f"redis://{redis_link.host}:{redis_link.port}/0", "--redis-timeout-s", "1")
    await stage.spawn("decode")
    zombie = await stage.spawn("prefill", *behind, *SLOW)
    other = await stage.spawn("prefill", stops_at=["before take"])
    await stage.serving(*stage.workers)
    await stage.ready()
    asking = [
        asyncio.create_task(ledger.ask(f"{number} is taken " * 20, stream=number % 2 == 0), name=str(number))
        for number in range(6)
    ]
    await _some_taken(stage)

    redis_link.stall()
    other.let()
    late = await stage.late(asking, RECOVERY_S)
    assert not late
    await stage.nothing_pending()
    before = await request_hashes(stage.pipeline)
    healed_at_ms = await _now_ms(stage)
    redis_link.heal()
    await _hears_of_it(stage, zombie.worker_id, healed_at_ms)
    await stage.pipeline.quiet()

    assert await request_hashes(stage.pipeline) == before
    await asyncio.gather(*(ledger.ask(f"{number} afterwards " * 20, stream=number % 2 == 0) for number in range(8)))
    ledger.all_right()


async def _some_taken(stage: Stage) -> None:
    async def none() -> str:
        pending = await stage.pipeline.redis.xpending(stage.pipeline.key("prefill"), "prefill")
        return "" if pending["pending"] else "no lease"

    await eventually(none, limit_s=60, what="jobs in its hands")


async def _now_ms(stage: Stage) -> float:
    seconds, microseconds = await stage.pipeline.redis.time()
    return float(seconds * 1000 + microseconds / 1000)


async def _hears_of_it(stage: Stage, worker_id: str, since_ms: float) -> None:
    """Waits for a heartbeat of the worker that is newer than that."""

    async def unheard() -> str:
        beat_at_ms = await stage.pipeline.redis.zscore(stage.pipeline.key("workers"), worker_id)
        return "" if beat_at_ms is not None and beat_at_ms > since_ms else f"last heard at {beat_at_ms}"

    await eventually(unheard, limit_s=60, what=f"{worker_id} back in the registry")
