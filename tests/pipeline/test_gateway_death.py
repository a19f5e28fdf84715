"""A gateway that dies takes its clients with it, and nothing else: what it had asked for is dropped everywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.pipeline import process_logs
from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger
from tests.servers import RedisServer

ORPHAN_S = 3.0
ENVIRON = {
    "PDQ_PREFILL_WORKER__ORPHAN_S": str(ORPHAN_S),
    "PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "300",
    # Nobody asks so often in vain; a decode worker gives a gateway up after 0.8 s, busy machine or not.
    "PDQ_PREFILL_WORKER__NOTICE_TRIES": "50",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "40",
    "PDQ_DECODE_WORKER__DELTA_GIVE_UP_S": "3",
}


async def is_back(pipeline: Pipeline) -> None:
    async def away() -> str:
        try:
            response = await pipeline.client.get("/ready")
        except httpx.HTTPError as error:
            return repr(error)
        return "" if response.status_code == 200 else response.text

    await eventually(away, limit_s=120, what="gateway")


async def test_a_killed_gateway_leaves_no_work_behind(tmp_path: Path, private_redis: RedisServer) -> None:
    async with running(tmp_path, private_redis, environ=ENVIRON) as pipeline:
        lost = Ledger(pipeline.client)
        async with asyncio.TaskGroup() as group:
            for number in range(30):
                group.create_task(lost.ask(f"{number} has bad luck " * 30, max_tokens=400, stream=True))

            async def too_early() -> str:
                decoding = sum(bool(line.text) for line in lost.lines)
                queued = await pipeline.redis.zcard(pipeline.key("ready"))
                return "" if decoding >= 3 and queued >= 3 else f"{decoding} decoding, {queued} queued"

            await eventually(too_early, limit_s=60, what="requests in every state")
            pipeline.kill("gateway-1")

        assert all(line.broken and not line.is_whole for line in lost.lines), "its clients see it at once"
        await is_back(pipeline)
        found = Ledger(pipeline.client)
        await asyncio.gather(*(found.ask(f"{number} has better luck", max_tokens=10) for number in range(10)))
        found.all_right()
        await pipeline.quiet(limit_s=ORPHAN_S + 40)
        silent = process_logs.events(pipeline.log_dir, "decode_worker_silent")
        assert not silent, "the decode worker says in time that the gateway is silent"
