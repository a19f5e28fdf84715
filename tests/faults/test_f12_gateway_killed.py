"""F12: one of two gateways is killed with a hundred requests in flight: those of the other one are unharmed, what it
had asked for is dropped everywhere, and nothing of it is left.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Literal

import httpx
import pytest

from tests.faults.conftest import ENVIRON
from tests.faults.invariants import open_books
from tests.pipeline.harness import eventually, running
from tests.pipeline.ledger import Ledger, text_of
from tests.servers import RedisServer

ORPHAN_S = 3.0
NUM_EACH = 50
OWN = {
    "PDQ_PREFILL_WORKER__ORPHAN_S": str(ORPHAN_S),
    "PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "100",
    "PDQ_PREFILL_WORKER__MAX_NUM_BATCHED_TOKENS": "512",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "20",
    "PDQ_DECODE_WORKER__DELTA_GIVE_UP_S": "3",
}
NEVER_S = 3600.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", [pytest.param("pull", marks=pytest.mark.long), "push"])
async def test_a_killed_gateway_takes_only_its_own_hundred_requests_with_it(
    tmp_path: Path, private_redis: RedisServer, mode: Literal["pull", "push"]
) -> None:
    environ, never = {**ENVIRON, **OWN}, (NEVER_S, NEVER_S)
    async with running(tmp_path, private_redis, mode=mode, gateways=2, environ=environ, restart_s=never) as pipeline:
        books = await open_books(pipeline)
        other_url = f"http://127.0.0.1:{pipeline.port + 1}"
        async with httpx.AsyncClient(
            base_url=other_url, timeout=60.0, limits=httpx.Limits(max_connections=None)
        ) as client:
            lost, unharmed = Ledger(pipeline.client), Ledger(client)
            rng = random.Random(12)
            async with asyncio.TaskGroup() as group:
                for number in range(NUM_EACH):
                    for ledger in (lost, unharmed):
                        ask = ledger.ask(text_of(300, rng), max_tokens=200, stream=number % 2 == 0)
                        group.create_task(ask)

                async def too_early() -> str:
                    decoding = sum(bool(line.text) for line in lost.lines)
                    queued = await pipeline.redis.zcard(pipeline.key("ready"))
                    return "" if decoding >= 3 and queued >= 3 else f"{decoding} decoding, {queued} queued"

                await eventually(too_early, limit_s=40, what="requests in every state")
                num_whole = sum(line.is_whole for line in lost.lines)
                pipeline.kill("gateway-1")

            unharmed.all_right()
            assert num_whole < NUM_EACH / 2
            assert all(line.broken for line in lost.lines if not line.is_right), "its clients see it at once"
            assert all(line.expected.startswith(line.text) for line in lost.lines)
            await pipeline.quiet(limit_s=60)
            await asyncio.gather(*(unharmed.ask(f"{number} afterwards", max_tokens=10) for number in range(10)))
            unharmed.all_right()
            await books.closed()
