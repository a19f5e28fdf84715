"""Processes that hang and wake up again: others take over in bounded time, and what the sleeper still says is void."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from tests.pipeline import process_logs
from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger, text_of
from tests.servers import RedisServer

STALL_S = 4.0
LIMIT_S = 40.0
"""For what takes a second on an idle machine."""
ENVIRON = {
    "PDQ_GATEWAY__STALL_S": str(STALL_S),
    "PDQ_GATEWAY__OWNER_SILENCE_S": "2",
    "PDQ_GATEWAY__OWNER_KV_WAIT_S": "8",
    "PDQ_PREFILL_WORKER__PREFILL_STALL_S": str(STALL_S),
    "PDQ_DECODE_WORKER__DECODE_STALL_S": str(STALL_S),
    "PDQ_PREFILL_WORKER__LEASE_S": "2",
    "PDQ_PREFILL_WORKER__MAX_FAILURES": "8",
    "PDQ_REDIS_GAP_S": "1",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "20",
}


def pids(pipeline: Pipeline, name: str, part: str) -> list[int]:
    """Of a role's process, its engine's, or both."""
    pid = pipeline.child(name).pid
    assert pid is not None
    engines = [child.pid for child in psutil.Process(pid).children()]
    return {"worker": [pid], "engine": engines, "both": [pid, *engines]}[part]


@contextlib.asynccontextmanager
async def stopped(pipeline: Pipeline, name: str, part: str) -> AsyncIterator[None]:
    stopped_pids = pids(pipeline, name, part)
    for pid in stopped_pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped_pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def streaming(ledger: Ledger, count: int) -> None:
    async def too_few() -> str:
        begun = sum(len(line.text) > 5 for line in ledger.lines)
        return "" if begun >= count else f"{begun} streams"

    await eventually(too_few, limit_s=LIMIT_S, what=f"{count} streams under way")


async def begun_at(pipeline: Pipeline, ledger: Ledger, name: str) -> None:
    """Waits until this decode worker has begun a stream and has most of its tokens still to send."""

    async def none() -> str:
        begun = [line for line in ledger.lines if not line.is_over and 5 < len(line.text) < len(line.expected) // 4]
        owners = [await pipeline.redis.hget(pipeline.key(f"req:{line.request_id}:1"), "decode") for line in begun]
        mark = f"-{pipeline.child(name).pid}-".encode()
        return "" if any(mark in (owner or b"") for owner in owners) else f"streams at {owners}"

    await eventually(none, limit_s=LIMIT_S, what=f"stream just begun at {name}")


@pytest.mark.parametrize("part", ["both", "worker", "engine"])
async def test_a_decode_worker_that_hangs_and_wakes_up_breaks_no_stream(
    tmp_path: Path, private_redis: RedisServer, part: str
) -> None:
    rng = random.Random(1)
    allowed = ("engine_stalled",)  # so it may look to who wakes up, too
    async with running(tmp_path, private_redis, decode=2, environ=ENVIRON, allowed_faults=allowed) as pipeline:
        ledger = Ledger(pipeline.client)
        is_enough = asyncio.Event()

        async def client(number: int) -> None:
            while not is_enough.is_set():
                await ledger.ask(f"{number} {text_of(250, rng)}", max_tokens=250, stream=True)

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(client(number)) for number in range(8)]
            await begun_at(pipeline, ledger, "decode-1")
            async with stopped(pipeline, "decode-1", part):
                is_enough.set()
                done, _ = await asyncio.wait(clients, timeout=STALL_S + LIMIT_S)
                assert len(done) == 8, "the other one has finished them all while this one hung"
                num_migrated = len(process_logs.events(pipeline.log_dir, "request_migrated", "gateway-1"))
                late = [group.create_task(ledger.ask(f"{number} comes late", max_tokens=5)) for number in range(8)]
                done, _ = await asyncio.wait(late, timeout=LIMIT_S)
                assert len(done) == 8, "nobody waits for the one that hangs"

        ledger.all_right()
        assert num_migrated
        migrated = process_logs.events(pipeline.log_dir, "request_migrated", "gateway-1")
        assert len(migrated) == num_migrated, "nobody is sent to the one that hangs"
        await pipeline.quiet()
        await asyncio.gather(*(ledger.ask(f"{n} afterwards", max_tokens=6) for n in range(10)))
        ledger.all_right()
        await pipeline.quiet()


async def test_a_prefill_engine_that_hangs_loses_its_jobs_to_another_worker(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    environ = {**ENVIRON, "PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "1000"}
    # The stall is an error worth a line each.
    async with running(
        tmp_path, private_redis, prefill=2, environ=environ, allowed_faults=("engine_stalled",)
    ) as pipeline:
        ledger = Ledger(pipeline.client)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ledger.ask(f"{n} {'x' * 300}", max_tokens=10)) for n in range(8)]

            async def not_taken() -> str:
                pending = await pipeline.redis.xpending(pipeline.key("prefill"), "prefill")
                owners = {consumer["name"] for consumer in pending["consumers"]}
                return "" if len(owners) == 2 else f"taken by {owners}"

            await eventually(not_taken, limit_s=LIMIT_S, what="jobs at both workers")
            async with stopped(pipeline, "prefill-1", "engine"):
                done, _ = await asyncio.wait(tasks, timeout=STALL_S + LIMIT_S)
                assert len(done) == 8, "answered while the engine hung"

        ledger.all_right()
        await pipeline.quiet()


async def test_workers_whose_engines_hang_for_good_are_started_again_and_their_requests_end_well(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    exits = {f"PDQ_{role}_WORKER__ENGINE_STALL_EXIT_S": "2" for role in ("PREFILL", "DECODE")}
    faults = ("engine_stalled", "fault", "the engine has made no progress")
    environ = {**ENVIRON, **exits, "PDQ_PREFILL_WORKER__PARK_S": "60"}
    async with running(tmp_path, private_redis, environ=environ, allowed_faults=faults) as pipeline:
        ledger = Ledger(pipeline.client)
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(ledger.ask(f"{number} {'x' * 300}", max_tokens=100, stream=True))
            await streaming(ledger, 4)
            for name in ("prefill-1", "decode-1"):
                (engine,) = pids(pipeline, name, "engine")
                os.kill(engine, signal.SIGSTOP)  # for good: nobody wakes it up
            for number in range(4):
                group.create_task(ledger.ask(f"{number} comes late", max_tokens=5))

        ledger.all_right()
        assert [pipeline.child(name).restarts for name in ("prefill-1", "decode-1")] == [1, 1]
        await pipeline.quiet()


async def test_a_gateway_that_hangs_goes_on_where_it_was(tmp_path: Path, private_redis: RedisServer) -> None:
    rng = random.Random(2)
    async with running(tmp_path, private_redis, prefill=2, decode=2, environ=ENVIRON) as pipeline:
        ledger = Ledger(pipeline.client)
        async with asyncio.TaskGroup() as group:
            for number in range(24):
                group.create_task(ledger.ask(f"{number} {text_of(200, rng)}", max_tokens=100, stream=number % 2 == 0))
            await streaming(ledger, 4)
            async with stopped(pipeline, "gateway-1", "worker"):
                await asyncio.sleep(3)

        ledger.all_right()

        async def untold() -> str:
            return (
                "" if process_logs.events(pipeline.log_dir, "gateway_hung", "gateway-1") else "it has noticed nothing"
            )

        await eventually(untold, limit_s=LIMIT_S, what="word of its sleep")
        migrated = process_logs.events(pipeline.log_dir, "request_migrated", "gateway-1")
        assert not migrated, "its own sleep is nobody's death"
        await pipeline.quiet()
