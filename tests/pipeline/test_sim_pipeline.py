"""The whole pipeline on the simulated engine: every answer right, nothing left behind, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest

from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.mixed_load import mixed_requests, run_mixed
from tests.servers import RedisServer

LIMIT_S = 60.0
LOAD_S = 4.0
"""What a busy machine may add to lease + 2 s."""


@pytest.fixture
async def pipeline(tmp_path: Path, private_redis: RedisServer) -> AsyncIterator[Pipeline]:
    async with running(tmp_path, private_redis, prefill=2, decode=1) as running_pipeline:
        yield running_pipeline


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["pull", "push", "local"])
async def test_two_thousand_mixed_requests_are_all_answered_right_and_leave_nothing(
    tmp_path: Path, private_redis: RedisServer, mode: Literal["pull", "push", "local"]
) -> None:
    prefill = 0 if mode == "local" else 3
    async with running(tmp_path, private_redis, mode=mode, prefill=prefill, decode=2, log_level="warning") as pipeline:
        await run_mixed(pipeline, mixed_requests(2000, seed=7), concurrency=64)

        await pipeline.quiet()


async def test_a_lone_prefill_worker_killed_in_mid_prefill_is_started_again_and_loses_nothing(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    slow = {"PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "4000"}
    settings = {"PDQ_PREFILL_WORKER__LEASE_S": "2", **slow, "PDQ_PREFILL_WORKER__REDIS_GAP_S": "1"}
    async with running(tmp_path, private_redis, prefill=1, decode=1, environ=settings) as pipeline:
        victim = next(name for name, r in (await pipeline.workers()).items() if r["role"] == "prefill")
        answer = asyncio.create_task(pipeline.complete("to be continued", max_tokens=5))

        async def not_taken() -> str:
            pending = await pipeline.redis.xpending_range(pipeline.key("prefill"), "prefill", "-", "+", 10)
            return "" if [p for p in pending if p["consumer"].decode() == victim] else "not taken yet"

        await eventually(not_taken, limit_s=LIMIT_S, what="job taken by the worker to be killed")
        pipeline.kill("prefill-1")

        text = (await answer)["choices"][0]["text"]

        assert text == "to be"
        await pipeline.quiet()


async def test_the_other_prefill_worker_takes_over_within_lease_plus_two_seconds(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    lease_s, prefill_s = 2.0, 3.0
    settings = {
        "PDQ_PREFILL_WORKER__LEASE_S": str(lease_s),
        "PDQ_PREFILL_WORKER__REDIS_GAP_S": "1",
        "PDQ_PREFILL_WORKER__SIM_PREFILL_MS": str(prefill_s * 1000),
    }
    async with running(tmp_path, private_redis, prefill=2, decode=1, environ=settings) as pipeline:
        loop = asyncio.get_running_loop()
        answer = asyncio.create_task(pipeline.complete("to be continued", max_tokens=5))
        owner = ""

        async def not_taken() -> str:
            nonlocal owner
            pending = await pipeline.redis.xpending_range(pipeline.key("prefill"), "prefill", "-", "+", 10)
            owner = pending[0]["consumer"].decode() if pending else ""
            return "" if owner else "not taken yet"

        await eventually(not_taken, limit_s=LIMIT_S, what="job taken")
        victim = next(c.name for c in pipeline.deployment.children if f"-{c.pid}-" in owner)
        killed_at = loop.time()
        pipeline.kill(victim)

        text = (await answer)["choices"][0]["text"]

        assert text == "to be"
        assert loop.time() - killed_at < lease_s + 2 + prefill_s + LOAD_S
        await pipeline.quiet()


async def test_service_resumes_by_itself_after_redis_was_killed_under_load(
    pipeline: Pipeline, private_redis: RedisServer
) -> None:
    answered, refused, wrong = 0, 0, []
    is_over = False

    async def client(number: int) -> None:
        nonlocal answered, refused
        while not is_over:
            prompt = f"request {number} {answered} " * 8
            body = {"model": "sim", "prompt": prompt, "max_tokens": 12, "temperature": 0}
            response = await pipeline.client.post("/v1/completions", json=body)
            if response.status_code == 200:
                answered += 1
                if response.json()["choices"][0]["text"] != prompt[:12]:
                    wrong.append(response.text)
            elif response.status_code == 503:
                refused += 1
                await asyncio.sleep(0.05)
            else:
                wrong.append(response.text)

    async with asyncio.TaskGroup() as clients:
        for number in range(8):
            clients.create_task(client(number))

        async def answers_more_than(target: int) -> None:
            async def too_few() -> str:
                return "" if answered > target else f"{answered} answers, {target} wanted; {refused} refused"

            await eventually(too_few, limit_s=LIMIT_S, what="progress")

        await answers_more_than(50)
        private_redis.kill()
        await asyncio.sleep(1)
        private_redis.start()
        await answers_more_than(answered + 100)
        is_over = True

    assert not wrong, wrong[:3]
    await pipeline.quiet()


async def test_a_stopped_pipeline_leaves_no_process(tmp_path: Path, private_redis: RedisServer) -> None:
    async with running(tmp_path, private_redis) as pipeline:
        await pipeline.complete("hello")
        pids = [child.pid for child in pipeline.deployment.children]

    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)
