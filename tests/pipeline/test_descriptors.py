"""Processes that go on while others die around them hold no more descriptors, threads and sockets than before."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger, text_of
from tests.servers import RedisServer

ENVIRON = {
    "PDQ_LEASE_S": "2",
    "PDQ_REDIS_GAP_S": "1",
    "PDQ_PREFILL_WORKER__MAX_FAILURES": "8",
    "PDQ_GATEWAY__OWNER_SILENCE_S": "1",
    "PDQ_PREFILL_WORKER__SIM_PREFILL_TOKEN_MS": "0.05",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "2",
}
SURVIVORS = ("gateway-1", "prefill-1", "decode-1")
FDS_OF_A_DEAD_PEER = 8
"""Links to it, on each side of a survivor, until they count as idle (a minute, the side channel's five)."""
IDLE_S = 320.0


class Held(NamedTuple):
    fds: int
    threads: int


def held_by(pipeline: Pipeline) -> dict[str, Held]:
    """Of the survivors' processes and their engines."""
    found = {}
    for name in SURVIVORS:
        process = psutil.Process(pipeline.child(name).pid)
        for what, one in ((name, process), *((f"{name}'s engine", engine) for engine in process.children())):
            found[what] = Held(one.num_fds(), one.num_threads())
    return found


async def one_cycle(pipeline: Pipeline, seed: int) -> None:
    """Requests of all kinds while one worker of each kind is killed; until that is there again."""
    rng = random.Random(seed)
    killed = ("prefill-2", "decode-2")
    restarts = [pipeline.child(name).restarts for name in killed]

    async def one(number: int) -> None:
        prompt = f"{seed}.{number} {text_of(rng.choice((5, 200)), rng)}"
        leaves = rng.uniform(0.0, 0.3) if number % 5 == 0 else None
        await ledger.ask(prompt, max_tokens=rng.choice((1, 60)), stream=number % 2 == 0, leave_after_s=leaves)

    async with httpx.AsyncClient(base_url=pipeline.url, timeout=60.0) as client:  # its connections end with it
        ledger = Ledger(client)
        async with asyncio.TaskGroup() as group:
            for number in range(60):
                group.create_task(one(number))
            await asyncio.sleep(0.2)
            for name in killed:
                pipeline.kill(name)
    ledger.all_right()

    async def away() -> str:
        records = await pipeline.workers()  # those of the dead among them, for a while
        ready = {int(worker_id.split("-")[2]) for worker_id, record in records.items() if record["state"] == "ready"}
        has_restarted = [pipeline.child(name).restarts for name in killed] == [count + 1 for count in restarts]
        missing = [child.name for child in pipeline.deployment.children if child.pid not in ready]
        return "" if has_restarted and not missing else f"not ready: {missing}"

    await eventually(away, limit_s=120, what="the killed ones, started again")
    await pipeline.quiet(limit_s=60)


@pytest.mark.parametrize("mode", ["push", pytest.param("pull", marks=pytest.mark.long)])
async def test_deaths_around_it_cost_a_process_no_more_than_links_that_end_when_idle(
    tmp_path: Path, private_redis: RedisServer, mode: str
) -> None:
    async with running(tmp_path, private_redis, mode=mode, prefill=2, decode=2, environ=ENVIRON) as pipeline:
        await one_cycle(pipeline, 0)
        before = held_by(pipeline)
        await one_cycle(pipeline, 1)
        after = held_by(pipeline)

        assert after.keys() == before.keys(), "nobody else has died"
        for name, held in after.items():
            assert held.threads <= before[name].threads + 2, name
            assert held.fds <= before[name].fds + 2 * FDS_OF_A_DEAD_PEER, name


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_when_idle_a_process_is_back_at_what_it_held_before_the_deaths(
    tmp_path: Path, private_redis: RedisServer, mode: str
) -> None:
    async with running(tmp_path, private_redis, mode=mode, prefill=2, decode=2, environ=ENVIRON) as pipeline:
        await one_cycle(pipeline, 0)
        await asyncio.sleep(IDLE_S)
        before = held_by(pipeline)
        for number in range(1, 6):
            await one_cycle(pipeline, number)
        await asyncio.sleep(IDLE_S)

        for name, held in held_by(pipeline).items():
            assert held.threads <= before[name].threads, name
            assert held.fds <= before[name].fds + 2, name
