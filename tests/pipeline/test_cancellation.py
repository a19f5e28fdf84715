"""A client that goes away, or a deadline that passes, while nobody can serve it. (Else: faults F11 and F33.)"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger, text_of
from tests.servers import RedisServer

FREED_WITHIN_S = 9.0
"""1 s is promised, and 1 s is the heartbeat that tells of it; the rest is for a busy machine. Below the KV lease."""
LATE_S = 10.0
"""A busy machine's answer at a deadline; a request lives for 600 s otherwise."""


async def state(pipeline: Pipeline, wanted: str) -> None:
    """Waits until the only request is in this state in Redis."""

    async def other() -> str:
        found = [await pipeline.redis.hget(key, "state") async for key in pipeline.redis.scan_iter("*:req:*")]
        return "" if found == [wanted.encode()] else f"states {found}"

    await eventually(other, limit_s=60, what=f"request that is {wanted}")


async def test_a_client_that_leaves_while_its_prefill_waits_for_a_decode_worker(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    environ = {"PDQ_DECODE_WORKER__NUM_BLOCKS": "40", "PDQ_DECODE_WORKER__SIM_DECODE_MS": "60"}
    async with running(tmp_path, private_redis, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        first = asyncio.create_task(ledger.ask("f" * 300, max_tokens=200))
        await state(pipeline, "decoding")
        second = asyncio.create_task(ledger.ask("s" * 300, max_tokens=200))

        async def not_parked() -> str:
            parked = [r["parked"] for r in (await pipeline.workers()).values() if r["role"] == "prefill"]
            return "" if parked == ["1"] else f"parked: {parked}"

        await eventually(not_parked, limit_s=60, what="parked prefill")
        second.cancel()

        await first
        ledger.lines = [line for line in ledger.lines if line.prompt[0] == "f"]
        ledger.all_right()
        await pipeline.quiet(limit_s=FREED_WITHIN_S)


async def test_a_deadline_in_a_queue_that_nobody_serves_is_a_504(tmp_path: Path, private_redis: RedisServer) -> None:
    async with running(tmp_path, private_redis, prefill=0, decode=1) as pipeline:
        line = await Ledger(pipeline.client).ask("nobody", headers={"X-Request-Timeout-S": "0.5"})

        assert line.status == 504
        assert line.seconds < 0.5 + LATE_S
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
