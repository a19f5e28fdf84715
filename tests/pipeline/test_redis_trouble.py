"""Redis stumbles under load: every client gets a right answer or a truthful error in bounded time; service resumes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger, text_of
from tests.servers import RedisServer

ENVIRON = {
    "PDQ_PREFILL_WORKER__LEASE_S": "3",
    "PDQ_PREFILL_WORKER__MAX_FAILURES": "8",
    "PDQ_REDIS_GAP_S": "2",
    "PDQ_REDIS_TIMEOUT_S": "15",
    "PDQ_GATEWAY__QUEUE_TIMEOUT_S": "15",
    "PDQ_PREFILL_WORKER__SIM_PREFILL_TOKEN_MS": "0.05",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "5",
}
BOUND_S = 40.0
NUM_CLIENTS, NUM_CUTS = 12, 5


@pytest.fixture
async def pipeline(tmp_path: Path, private_redis: RedisServer) -> AsyncIterator[Pipeline]:
    async with running(tmp_path, private_redis, prefill=2, decode=1, environ=ENVIRON) as running_pipeline:
        yield running_pipeline


@contextlib.asynccontextmanager
async def clients(ledger: Ledger, *, count: int = NUM_CLIENTS) -> AsyncIterator[None]:
    """So many clients that ask one request after the other, until the block is left."""
    is_over = False
    rng = random.Random(count)

    async def client(number: int) -> None:
        turn = 0
        while not is_over:
            turn += 1
            prompt = f"{number}.{turn} {text_of(rng.choice((5, 100, 1500)), rng)}"
            line = await ledger.ask(prompt, max_tokens=rng.choice((1, 20, 60)), stream=turn % 2 == 0)
            if not line.is_right:
                await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(client(number))
        try:
            yield
        finally:
            is_over = True


async def more_right_answers(ledger: Ledger, count: int, *, limit_s: float = BOUND_S) -> None:
    target = ledger.num_right + count

    async def too_few() -> str:
        return "" if ledger.num_right >= target else f"{ledger.num_right} right answers, {target} wanted"

    await eventually(too_few, limit_s=limit_s, what="progress")


def check(ledger: Ledger) -> None:
    ledger.all_truthful("queue_unavailable")
    assert max(line.seconds for line in ledger.lines) < BOUND_S


async def test_connections_that_redis_cuts_under_load_cost_nobody_a_wrong_answer(pipeline: Pipeline) -> None:
    ledger = Ledger(pipeline.client)
    async with clients(ledger):
        for _ in range(NUM_CUTS):
            await more_right_answers(ledger, 30)
            await pipeline.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await more_right_answers(ledger, 50)

    check(ledger)
    num_failed = len(ledger.lines) - ledger.num_right
    assert num_failed <= NUM_CUTS * NUM_CLIENTS, "a cut connection fails what was on it, no more"
    await pipeline.quiet()


async def test_a_redis_that_hangs_for_four_seconds_holds_requests_up_and_loses_none(
    pipeline: Pipeline, private_redis: RedisServer
) -> None:
    ledger = Ledger(pipeline.client)
    async with clients(ledger):
        await more_right_answers(ledger, 30)
        private_redis.pause()
        try:
            await asyncio.sleep(4)
        finally:
            private_redis.resume()
        await more_right_answers(ledger, 50)

    check(ledger)
    assert not [line for line in ledger.lines if not line.is_right], "shorter than the time-outs of the calls"
    await pipeline.quiet()


async def test_a_redis_that_hangs_longer_than_its_time_outs_is_a_503(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    environ = {**ENVIRON, "PDQ_REDIS_TIMEOUT_S": "1", "PDQ_GATEWAY__QUEUE_TIMEOUT_S": "1"}
    async with running(tmp_path, private_redis, prefill=2, decode=1, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        async with clients(ledger):
            await more_right_answers(ledger, 30)
            private_redis.pause()
            try:
                await asyncio.sleep(4)
            finally:
                private_redis.resume()
            await more_right_answers(ledger, 50)

        check(ledger)
        assert [line for line in ledger.lines if line.status == 503]
        await pipeline.quiet()


async def test_a_redis_that_loses_everything_under_load_costs_nobody_an_answer(pipeline: Pipeline) -> None:
    ledger = Ledger(pipeline.client)
    async with clients(ledger):
        for _ in range(3):
            await more_right_answers(ledger, 40)
            await pipeline.redis.flushall()
        await more_right_answers(ledger, 50)

    check(ledger)
    assert not [line for line in ledger.lines if not line.is_right], "the gateway enqueues again what was lost"
    await pipeline.quiet()


async def test_requests_that_wait_when_everything_is_lost_are_answered(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    environ = {**ENVIRON, "PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "600"}
    async with running(tmp_path, private_redis, prefill=1, decode=1, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(ledger.ask(f"{number} waits in a queue that is gone", max_tokens=12))

            async def not_queued() -> str:
                return "" if await pipeline.redis.xlen(pipeline.key("prefill")) > 10 else "too few in the queue"

            await eventually(not_queued, limit_s=60, what="queue")
            await pipeline.redis.flushall()

        ledger.all_right()
        await pipeline.quiet()
