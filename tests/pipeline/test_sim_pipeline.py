"""The whole pipeline on the simulated engine: every answer right, nothing left behind, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import string
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from benchmarks.load_client import http_request, run_load
from tests.pipeline.harness import Pipeline, eventually, running
from tests.servers import RedisServer

NUM_REQUESTS = 2000


@pytest.fixture
async def pipeline(tmp_path: Path, private_redis: RedisServer) -> AsyncIterator[Pipeline]:
    async with running(tmp_path, private_redis, prefill=2, decode=1) as running_pipeline:
        yield running_pipeline


def text_of(length: int, rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters + " ", k=length))


@pytest.mark.timeout(300)
async def test_two_thousand_mixed_requests_are_all_answered_right_and_leave_nothing(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    rng = random.Random(7)
    lengths = [rng.choice((1, 15, 16, 17, 100, 300, 1500)) for _ in range(NUM_REQUESTS)]
    shared = text_of(200, rng)
    prompts = [
        shared[: length // 2] + text_of(length - length // 2, rng) if length > 20 else text_of(length, rng)
        for length in lengths
    ]
    limits = [rng.choice((1, 2, 8, 40)) for _ in prompts]
    async with running(tmp_path, private_redis, prefill=3, decode=2, log_level="warning") as pipeline:

        def request(number: int) -> bytes:
            body = {"model": "sim", "prompt": prompts[number], "max_tokens": limits[number], "temperature": 0}
            return http_request("/v1/completions", body)

        _, responses = await run_load(
            "127.0.0.1", pipeline.port, concurrency=64, requests=NUM_REQUESTS, make_request=request, keep_body=True
        )

        wrong = []
        for prompt, limit, response in zip(prompts, limits, responses, strict=True):
            expected = prompt[:limit]
            if response.status != 200 or f'"text":"{expected}"' not in response.body.decode().replace('": "', '":"'):
                wrong.append((len(prompt), limit, response.status, response.error, response.body[:300]))
        assert not wrong, (len(wrong), wrong[:3])
        await pipeline.quiet()


async def test_a_lone_prefill_worker_killed_in_mid_prefill_is_started_again_and_loses_nothing(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    slow = {"PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "1500"}
    settings = {"PDQ_PREFILL_WORKER__LEASE_S": "2", **slow, "PDQ_PREFILL_WORKER__REDIS_GAP_S": "1"}
    async with running(tmp_path, private_redis, prefill=1, decode=1, environ=settings) as pipeline:
        victim = next(name for name, r in (await pipeline.workers()).items() if r["role"] == "prefill")
        answer = asyncio.create_task(pipeline.complete("to be continued", max_tokens=5))

        async def not_taken() -> str:
            pending = await pipeline.redis.xpending_range(pipeline.key("prefill"), "prefill", "-", "+", 10)
            return "" if [p for p in pending if p["consumer"].decode() == victim] else "not taken yet"

        await eventually(not_taken, limit_s=5, what="job taken by the worker to be killed")
        pipeline.kill("prefill-1")

        text = (await answer)["choices"][0]["text"]

        assert text == "to be"
        await pipeline.quiet()


async def test_the_other_prefill_worker_takes_over_within_lease_plus_two_seconds(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    lease_s, prefill_s = 2.0, 1.0
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

        await eventually(not_taken, limit_s=5, what="job taken")
        victim = next(c.name for c in pipeline.deployment.children if f"-{c.pid}-" in owner)
        killed_at = loop.time()
        pipeline.kill(victim)

        text = (await answer)["choices"][0]["text"]

        assert text == "to be"
        assert loop.time() - killed_at < lease_s + 2 + prefill_s
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

            await eventually(too_few, limit_s=20, what="progress")

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
