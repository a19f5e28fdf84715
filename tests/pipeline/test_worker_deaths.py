"""Processes die, stop and are told to stop under load: every client gets its own right answer, and nothing is left."""

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

LEASE_S = 2.0
LIMIT_S = 60.0
"""For what takes a second on an idle machine, or ten when a process starts."""
ENVIRON = {
    "PDQ_PREFILL_WORKER__LEASE_S": str(LEASE_S),
    "PDQ_PREFILL_WORKER__MAX_FAILURES": "8",
    "PDQ_REDIS_GAP_S": "1",
    "PDQ_PREFILL_WORKER__SIM_PREFILL_TOKEN_MS": "0.05",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "5",
}
UNHURRIED = {
    **ENVIRON,
    "PDQ_PREFILL_WORKER__LEASE_S": "10",
    "PDQ_PREFILL_WORKER__HEARTBEAT_S": "0.2",
    "PDQ_PREFILL_WORKER__NOTICE_TRIES": "50",
}
"""On a busy machine, too, no lease runs out, prefill workers hear in time who leaves, and who lives is not silent."""


@contextlib.asynccontextmanager
async def load(pipeline: Pipeline, ledger: Ledger, *, requests: int, concurrency: int = 16) -> AsyncIterator[None]:
    """So many mixed requests in the background; leaving waits for the last answer."""
    rng = random.Random(requests)
    room = asyncio.Semaphore(concurrency)
    shared = text_of(300, rng)

    async def one(number: int) -> None:
        async with room:
            prompt = f"{shared if number % 3 else ''}{number}: {text_of(rng.choice((5, 100, 1500)), rng)}"
            await ledger.ask(prompt, max_tokens=rng.choice((1, 10, 60)), stream=number % 2 == 0)

    async with asyncio.TaskGroup() as group:
        for number in range(requests):
            group.create_task(one(number))
        yield


async def answered(ledger: Ledger, count: int) -> None:
    async def too_few() -> str:
        done = sum(bool(line.status) and line.is_whole for line in ledger.lines)
        return "" if done >= count else f"{done} answers"

    await eventually(too_few, limit_s=LIMIT_S, what=f"{count} answers")


def engine_of(pipeline: Pipeline, name: str) -> int:
    """Pid of a worker's engine process."""
    pid = pipeline.child(name).pid
    assert pid is not None
    (engine,) = psutil.Process(pid).children()
    return engine.pid


async def test_prefill_workers_killed_under_load_lose_no_request(tmp_path: Path, private_redis: RedisServer) -> None:
    rng = random.Random(3)
    async with running(tmp_path, private_redis, prefill=2, decode=1, environ=ENVIRON) as pipeline:
        ledger = Ledger(pipeline.client)
        async with load(pipeline, ledger, requests=150):
            for kill, name in enumerate(("prefill-1", "prefill-2"), start=1):
                await answered(ledger, 40 * kill)
                await asyncio.sleep(rng.random() * 0.1)
                pipeline.kill(name)

        ledger.all_right()
        await pipeline.quiet()


async def test_a_decode_worker_killed_in_mid_stream_leaves_the_streams_whole(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    environ = {**ENVIRON, "PDQ_DECODE_WORKER__SIM_DECODE_MS": "20"}
    async with running(tmp_path, private_redis, prefill=1, decode=2, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        rng = random.Random(5)
        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(ledger.ask(f"{number} {text_of(400, rng)}", max_tokens=400, stream=number % 4 < 3))

            async def too_short() -> str:
                streams = [line for line in ledger.lines if line.is_stream]
                shortest = min((len(line.text) for line in streams), default=0)
                return "" if len(streams) == 9 and shortest > 20 else f"{len(streams)} streams, {shortest} tokens"

            await eventually(too_short, limit_s=LIMIT_S, what="streams under way")
            pipeline.kill("decode-1")

        ledger.all_right()
        assert process_logs.events(pipeline.log_dir, "request_migrated", "gateway-1")
        assert max(line.seconds for line in ledger.lines) < 30  # of which the tokens take 8 s
        await pipeline.quiet()


async def test_the_kv_for_a_decode_worker_that_died_before_it_read_is_freed_at_once(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    environ = {**ENVIRON, "PDQ_PREFILL_WORKER__KV_HOLD_S": "300", "PDQ_DECODE_WORKER__DECODE_STALL_S": "60"}
    async with running(tmp_path, private_redis, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        os.kill(engine_of(pipeline, "decode-1"), signal.SIGSTOP)  # it accepts, and reads nothing
        asking = asyncio.create_task(ledger.ask("read me " * 50, max_tokens=8))

        async def not_accepted() -> str:
            return "" if process_logs.events(pipeline.log_dir, "handed_over", "prefill-1") else "not handed over"

        await eventually(not_accepted, limit_s=LIMIT_S, what="accepted prefill")
        pipeline.kill("decode-1")
        await asking

        ledger.all_right()
        await pipeline.quiet(limit_s=30)  # far below kv_hold_s, the backstop


async def test_a_prefill_worker_that_wakes_up_after_its_lease_does_no_harm(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    environ = {**ENVIRON, "PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "50"}
    async with running(tmp_path, private_redis, prefill=2, decode=1, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        async with load(pipeline, ledger, requests=100, concurrency=24):
            await answered(ledger, 10)
            zombie = [pipeline.child("prefill-1").pid or 0, engine_of(pipeline, "prefill-1")]
            for pid in zombie:
                os.kill(pid, signal.SIGSTOP)
            try:
                await answered(ledger, 95)  # some only after the lease, by the other one
            finally:
                for pid in zombie:
                    os.kill(pid, signal.SIGCONT)
            async with load(pipeline, ledger, requests=30):
                pass

        ledger.all_right()
        await pipeline.quiet()


@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
async def test_a_worker_that_is_told_to_stop_finishes_what_it_has(
    tmp_path: Path, private_redis: RedisServer, name: str
) -> None:
    async with running(tmp_path, private_redis, prefill=2, decode=2, environ=UNHURRIED) as pipeline:
        ledger = Ledger(pipeline.client)
        child = pipeline.child(name)
        async with load(pipeline, ledger, requests=150):
            await answered(ledger, 30)
            pipeline.kill(name, signal.SIGTERM)

            async def still_running() -> str:
                return "" if child.restarts else "it runs"

            await eventually(still_running, limit_s=LIMIT_S, what="drained worker")

        ledger.all_right()
        assert process_logs.events(pipeline.log_dir, "stopped", name), "it ended by itself"
        assert not process_logs.events(pipeline.log_dir, "request_migrated", "gateway-1")
        assert not process_logs.events(pipeline.log_dir, "leases_reaped")
        assert not process_logs.events(pipeline.log_dir, "decode_worker_silent"), "nobody asked a worker that had gone"
        await pipeline.quiet()


async def test_a_gateway_that_is_told_to_stop_answers_what_it_has(tmp_path: Path, private_redis: RedisServer) -> None:
    environ = {**ENVIRON, "PDQ_DECODE_WORKER__SIM_DECODE_MS": "20"}
    async with running(tmp_path, private_redis, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        child = pipeline.child("gateway-1")
        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(ledger.ask(f"{number} is in flight " * 10, max_tokens=60, stream=number % 2 == 0))

            async def too_early() -> str:
                streams = [line for line in ledger.lines if line.is_stream]
                return "" if len(streams) == 5 and all(line.text for line in streams) else "not all begun"

            await eventually(too_early, limit_s=LIMIT_S, what="streams under way")
            pipeline.kill("gateway-1", signal.SIGTERM)

        ledger.all_right()

        async def still_running() -> str:
            return "" if child.restarts else "it runs"

        await eventually(still_running, limit_s=LIMIT_S, what="drained gateway")
        assert process_logs.events(pipeline.log_dir, "stopped", "gateway-1")
        await pipeline.quiet()


@pytest.mark.parametrize("name", ["prefill-1", "decode-1"])
async def test_a_worker_whose_engine_dies_gives_its_work_back_and_is_started_again(
    tmp_path: Path, private_redis: RedisServer, name: str
) -> None:
    allowed = ("fault", "the engine process ended")
    async with running(
        tmp_path, private_redis, prefill=1, decode=1, environ=ENVIRON, allowed_faults=allowed
    ) as pipeline:
        ledger = Ledger(pipeline.client)
        child = pipeline.child(name)
        async with load(pipeline, ledger, requests=80):
            await answered(ledger, 20)
            os.kill(engine_of(pipeline, name), signal.SIGKILL)

            async def not_restarted() -> str:
                return "" if child.restarts == 1 and child.state == "running" else child.state

            await eventually(not_restarted, limit_s=LIMIT_S, what="restarted worker")

        ledger.all_right()
        assert child.restarts == 1
        await pipeline.quiet()
