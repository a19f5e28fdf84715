"""A long run in which everything dies, hangs and forgets at random; the ledger must still add up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from tests.pipeline.harness import Pipeline, running
from tests.pipeline.ledger import Ledger, text_of
from tests.servers import RedisServer

RUN_S = float(os.environ.get("CHAOS_SECONDS", "90"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
NUM_CLIENTS = 16
ENVIRON = {
    "PDQ_GATEWAY__STALL_S": "2",
    "PDQ_GATEWAY__OWNER_SILENCE_S": "1.5",
    "PDQ_GATEWAY__OWNER_KV_WAIT_S": "6",
    "PDQ_GATEWAY__MAX_MIGRATIONS": "8",
    "PDQ_PREFILL_WORKER__MAX_FAILURES": "8",
    "PDQ_PREFILL_WORKER__PREFILL_STALL_S": "2",
    "PDQ_PREFILL_WORKER__LEASE_S": "2",
    "PDQ_REDIS_GAP_S": "1",
    "PDQ_PREFILL_WORKER__SIM_PREFILL_TOKEN_MS": "0.1",
    "PDQ_DECODE_WORKER__DECODE_STALL_S": "2",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "5",
}
PROVOKED = ("fault", "the engine process ended", "engine_stalled", "forced_exit")


async def client(ledger: Ledger, number: int, is_over: asyncio.Event) -> None:
    rng = random.Random(f"{SEED} {number}")
    turn = 0
    while not is_over.is_set():
        turn += 1
        prompt = f"{number}.{turn} {text_of(rng.choice((5, 100, 1500)), rng)}"
        line = await ledger.ask(
            prompt,
            max_tokens=rng.choice((1, 20, 200)),
            stream=rng.random() < 0.5,
            leave_after_s=rng.random() if rng.random() < 0.1 else None,
        )
        if not line.is_right:
            await asyncio.sleep(0.1)


async def strike(pipeline: Pipeline, server: RedisServer, rng: random.Random) -> str:
    """One misfortune. At least one worker of each role is spared: the second ones are never touched."""
    victim = rng.choice(("prefill-1", "prefill-3", "decode-1"))
    kind = rng.choice(("kill", "engine", "terminate", "hang", "redis connections", "redis hangs", "redis forgets"))
    pid = pipeline.child(victim).pid
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        match kind:
            case "kill" if pid:
                os.kill(pid, signal.SIGKILL)
            case "engine" if pid:
                for child in psutil.Process(pid).children():
                    child.kill()
            case "terminate" if pid:
                os.kill(pid, signal.SIGTERM)
            case "hang" if pid:
                group = [psutil.Process(pid), *psutil.Process(pid).children()]
                for process in group:
                    process.suspend()
                await asyncio.sleep(rng.choice((0.5, 3.0)))
                for process in group:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.resume()
            case "redis connections":
                await pipeline.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            case "redis hangs":
                server.pause()
                await asyncio.sleep(1.5)
                server.resume()
            case "redis forgets":
                await pipeline.redis.flushall()
    return f"{kind} {victim}"


@pytest.mark.long
@pytest.mark.timeout(RUN_S + 120)
async def test_whatever_happens_every_client_gets_its_right_answer(tmp_path: Path, private_redis: RedisServer) -> None:
    rng = random.Random(SEED)
    struck = []
    async with running(
        tmp_path, private_redis, prefill=3, decode=2, environ=ENVIRON, allowed_faults=PROVOKED, log_level="warning"
    ) as pipeline:
        ledger = Ledger(pipeline.client)
        is_over = asyncio.Event()
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + RUN_S
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(client(ledger, number, is_over))
            while loop.time() < ends_at:
                await asyncio.sleep(rng.uniform(0.2, 3.0))
                struck.append(await strike(pipeline, private_redis, rng))
            is_over.set()

        print(len(ledger.lines), "requests", struck)
        ledger.all_truthful("queue_unavailable")
        assert ledger.num_right > 0.9 * sum(not line.is_left for line in ledger.lines)
        assert max(line.seconds for line in ledger.lines) < 40
        await pipeline.quiet()
