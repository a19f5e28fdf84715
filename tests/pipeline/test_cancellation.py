"""A client that goes away, or a deadline that passes, frees queue entry, compute and KV on both sides, at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.pipeline import process_logs
from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger, text_of
from tests.servers import RedisServer

FREED_WITHIN_S = 2.5
"""Of which up to 1 s is the heartbeat that tells of it."""
SLOW = {"PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "700", "PDQ_DECODE_WORKER__SIM_DECODE_MS": "20"}


@pytest.fixture
async def pipeline(tmp_path: Path, private_redis: RedisServer) -> AsyncIterator[Pipeline]:
    async with running(tmp_path, private_redis, environ=SLOW) as running_pipeline:
        yield running_pipeline


async def state(pipeline: Pipeline, wanted: str) -> None:
    """Waits until the only request is in this state in Redis."""

    async def other() -> str:
        found = [await pipeline.redis.hget(key, "state") async for key in pipeline.redis.scan_iter("*:req:*")]
        return "" if found == [wanted.encode()] else f"states {found}"

    await eventually(other, limit_s=5, what=f"request that is {wanted}")


async def hang_up(pipeline: Pipeline, asking: asyncio.Task[object]) -> None:
    """Closes the client's connection."""
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()
    await pipeline.quiet(limit_s=FREED_WITHIN_S)


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
async def test_a_client_that_leaves_while_its_request_is_queued(
    tmp_path: Path, private_redis: RedisServer, stream: bool
) -> None:
    async with running(tmp_path, private_redis, prefill=0, decode=1) as pipeline:
        asking = asyncio.create_task(Ledger(pipeline.client).ask("nobody takes me", stream=stream))
        await state(pipeline, "queued")

        await hang_up(pipeline, asking)

        await state(pipeline, "cancelled")


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
async def test_a_client_that_leaves_while_its_prompt_is_computed(pipeline: Pipeline, stream: bool) -> None:
    asking = asyncio.create_task(Ledger(pipeline.client).ask("compute me " * 50, stream=stream))
    await state(pipeline, "prefill")

    await hang_up(pipeline, asking)

    await state(pipeline, "cancelled")
    await one_good_request(pipeline)


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
async def test_a_client_that_leaves_while_its_answer_is_decoded(pipeline: Pipeline, stream: bool) -> None:
    asking = asyncio.create_task(Ledger(pipeline.client).ask("a long answer " * 50, max_tokens=700, stream=stream))
    await state(pipeline, "decoding")

    await hang_up(pipeline, asking)

    await one_good_request(pipeline)
    finished = process_logs.events(pipeline.log_dir, "request_finished", "gateway-1")
    assert [record["outcome"] for record in finished] == ["cancelled", "ok"]
    assert finished[0]["num_generated_tokens"] < 700


async def test_a_client_that_leaves_while_its_prefill_waits_for_a_decode_worker(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    environ = {"PDQ_DECODE_WORKER__NUM_BLOCKS": "40", "PDQ_DECODE_WORKER__SIM_DECODE_MS": "20"}
    async with running(tmp_path, private_redis, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        first = asyncio.create_task(ledger.ask("f" * 300, max_tokens=200))
        await state(pipeline, "decoding")
        second = asyncio.create_task(ledger.ask("s" * 300, max_tokens=200))

        async def not_parked() -> str:
            parked = [r["parked"] for r in (await pipeline.workers()).values() if r["role"] == "prefill"]
            return "" if parked == ["1"] else f"parked: {parked}"

        await eventually(not_parked, limit_s=3, what="parked prefill")
        second.cancel()

        await first
        ledger.lines = [line for line in ledger.lines if line.prompt[0] == "f"]
        ledger.all_right()
        await pipeline.quiet(limit_s=FREED_WITHIN_S)


@pytest.mark.parametrize(
    ("timeout_s", "where"), [("0.3", "prefill worker"), ("1.2", "decoding")], ids=["computing", "decoding"]
)
async def test_a_deadline_is_a_504_and_frees_everything(pipeline: Pipeline, timeout_s: str, where: str) -> None:
    ledger = Ledger(pipeline.client)

    line = await ledger.ask("too slow " * 100, max_tokens=800, headers={"X-Request-Timeout-S": timeout_s})

    assert line.status == 504, line
    assert line.error is not None
    assert (line.error["code"], line.error["type"]) == ("deadline_exceeded", "timeout_error")
    assert where in line.error["message"]
    assert line.seconds == pytest.approx(float(timeout_s), abs=0.4)
    await pipeline.quiet(limit_s=FREED_WITHIN_S)
    await one_good_request(pipeline)


async def test_a_deadline_in_a_queue_that_nobody_serves_is_a_504(tmp_path: Path, private_redis: RedisServer) -> None:
    async with running(tmp_path, private_redis, prefill=0, decode=1) as pipeline:
        line = await Ledger(pipeline.client).ask("nobody", headers={"X-Request-Timeout-S": "0.5"})

        assert line.status == 504
        assert line.seconds < 1.5
        await pipeline.quiet(limit_s=FREED_WITHIN_S)


async def test_a_deadline_in_a_stream_that_has_begun_is_an_error_event(pipeline: Pipeline) -> None:
    ledger = Ledger(pipeline.client)

    line = await ledger.ask("too slow " * 100, max_tokens=800, stream=True, headers={"X-Request-Timeout-S": "1.5"})

    assert line.status == 200
    assert line.text
    ledger.all_truthful("deadline_exceeded")
    assert not line.is_right
    await pipeline.quiet(limit_s=FREED_WITHIN_S)


async def test_fifty_clients_that_leave_at_random_moments_harm_nobody(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    rng = random.Random(11)
    environ = {"PDQ_PREFILL_WORKER__SIM_PREFILL_TOKEN_MS": "0.05", "PDQ_DECODE_WORKER__SIM_DECODE_MS": "5"}
    async with running(tmp_path, private_redis, prefill=2, decode=1, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        shared = text_of(400, rng)
        async with asyncio.TaskGroup() as group:
            for number in range(70):
                prompt = f"{shared if number % 2 else ''}{number} {text_of(rng.choice((10, 300, 2000)), rng)}"
                leave_after_s = None if number % 7 < 2 else rng.choice((0.005, 0.05, 0.2, 0.5)) * rng.random()
                group.create_task(
                    ledger.ask(
                        prompt,
                        max_tokens=rng.choice((1, 20, 100)),
                        stream=rng.random() < 0.5,
                        leave_after_s=leave_after_s,
                    )
                )
                await asyncio.sleep(rng.random() * 0.02)

        assert sum(line.is_left for line in ledger.lines) >= 25
        ledger.all_right()
        await pipeline.quiet(limit_s=FREED_WITHIN_S)


async def one_good_request(pipeline: Pipeline) -> None:
    ledger = Ledger(pipeline.client)
    await ledger.ask("still alive", max_tokens=5)
    ledger.all_right()
    await pipeline.quiet(limit_s=FREED_WITHIN_S)
