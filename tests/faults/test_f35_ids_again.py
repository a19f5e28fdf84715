"""F35: a gateway dies, and a new one at its address is asked with the ids of requests that the workers still know."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import httpx
import pytest

from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger
from tests.servers import RedisServer, free_port

ENVIRON = {
    "PDQ_PREFILL_WORKER__ORPHAN_S": "3",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "40",
    "PDQ_DECODE_WORKER__DELTA_GIVE_UP_S": "20",
}


@pytest.mark.parametrize("mode", ["push"])
async def test_ids_of_requests_that_died_with_their_gateway_get_their_own_answers(
    tmp_path: Path, private_redis: RedisServer, mode: Literal["push", "pull"]
) -> None:
    environ = {**ENVIRON, "PDQ_GATEWAY__INBOX_PORT": str(free_port())}
    async with running(tmp_path, private_redis, mode=mode, environ=environ) as pipeline:
        lost, found = Ledger(pipeline.client), Ledger(pipeline.client)
        ids = [{"X-Request-Id": f"id-{number}"} for number in range(8)]
        async with asyncio.TaskGroup() as group:
            for number, headers in enumerate(ids):
                prompt = f"{number} dies with its gateway " * 20
                group.create_task(lost.ask(prompt, max_tokens=400, stream=True, headers=headers))
            await _streaming(lost, len(ids))
            pipeline.kill("gateway-1")

        await _back(pipeline)
        prompts = [f"{number} lives under an old id " * 20 for number in range(len(ids))]
        await asyncio.gather(
            *(
                found.ask(prompt, max_tokens=100, stream=True, headers=headers)
                for prompt, headers in zip(prompts, ids, strict=True)
            )
        )

        assert all(line.broken for line in lost.lines)
        found.all_right()
        assert [line.request_id for line in found.lines] == [headers["X-Request-Id"] for headers in ids]
        await pipeline.quiet(limit_s=60)


async def _streaming(ledger: Ledger, count: int) -> None:
    async def too_few() -> str:
        begun = sum(len(line.text) > 5 for line in ledger.lines)
        return "" if begun >= count else f"{begun} streams"

    await eventually(too_few, limit_s=60, what="streams under way")


async def _back(pipeline: Pipeline) -> None:
    async def away() -> str:
        try:
            response = await pipeline.client.get("/ready")
        except httpx.HTTPError as error:
            return repr(error)
        return "" if response.status_code == 200 else response.text

    await eventually(away, limit_s=90, what="gateway")
