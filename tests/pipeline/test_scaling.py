"""Workers come and go under load: new ones work at once, those that go lose nothing, and nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from tests.pipeline import process_logs
from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger, text_of
from tests.pipeline.leftovers import consumers, consumers_of_the_dead, lasting_keys
from tests.servers import RedisServer

PDQ = [sys.executable, "-c", "import sys; from pdq.cli.main import main; sys.exit(main())"]
TAKES_WORK_WITHIN_S = 10.0  # 0.2 to 0.3 s on a quiet machine; the worker looks for work all the time
LIMIT_S = 150.0
"""Of a command, which gives up by itself after 120 s and says why."""
LINKS_IDLE_S = 120.0
"""A link to a process that is gone is closed 60 to 90 s after its last use."""
HELD_S = 90.0
"""KV that nobody reads any more is freed within 60 s."""
NUM_CLIENTS = 6
ENVIRON = {
    "PDQ_PREFILL_WORKER__LEASE_S": "2",
    "PDQ_PREFILL_WORKER__MAX_FAILURES": "8",
    "PDQ_REDIS_GAP_S": "1",
    "PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "20",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "5",
}


async def pdq(pipeline: Pipeline, *words: str) -> str:
    """What the command prints; it must succeed."""
    command = [*PDQ, *words, "--redis", pipeline.deployment.redis_url, "--served-model-name", pipeline.model]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0, output.decode()
    return output.decode()


@contextlib.asynccontextmanager
async def constant_load(ledger: Ledger, *, clients: int = NUM_CLIENTS) -> AsyncIterator[None]:
    """So many clients that ask one thing after the other until the block ends; leaving waits for the last answers."""
    rng = random.Random(clients)
    is_over = False

    async def client(number: int) -> None:
        while not is_over:
            prompt = f"{number}: {text_of(rng.choice((5, 100, 800)), rng)}"
            await ledger.ask(prompt, max_tokens=rng.choice((1, 10, 60)), stream=number % 2 == 0)

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
        try:
            yield
        finally:
            is_over = True


async def more_answers(ledger: Ledger, count: int) -> None:
    """Waits until so many more requests were answered: some work for every worker there is."""
    target = sum(line.is_over for line in ledger.lines) + count

    async def too_few() -> str:
        answered = sum(line.is_over for line in ledger.lines)
        return "" if answered >= target else f"{answered} answers, {target} wanted"

    await eventually(too_few, limit_s=60, what="answers under load")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """What a deployment has beside its data: to be the same before and after workers came and went."""

    num_processes: int
    files: frozenset[str]
    num_gateway_sockets: int


def files_of(folder: Path) -> frozenset[str]:
    """Logs apart, and the server's data: it begins a new file when one has grown."""
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.suffix != ".log"}
    return frozenset(str(path) for path in found if path.parts[0] != "appendonlydir")


def traces(pipeline: Pipeline, folder: Path) -> Traces:
    gateway = psutil.Process(pipeline.child("gateway-1").pid)
    return Traces(
        num_processes=len(psutil.Process().children(recursive=True)),
        files=files_of(folder),
        num_gateway_sockets=gateway.num_fds(),
    )


async def all_there(pipeline: Pipeline, count: int) -> None:
    """Waits until so many are in the registry. One that is late with a heartbeat isn't, for a moment."""

    async def others() -> str:
        found = sorted(await pipeline.workers())
        return "" if len(found) == count else str(found)

    await eventually(others, limit_s=60, what=f"{count} processes in the registry")


def seconds_to_first_work(log_dir: Path, role: str) -> float | None:
    """Of the second worker of the role: from its `ready` until it handed over or was handed its first request."""
    ready = process_logs.events(log_dir, "ready", f"{role}-2")
    handed_over = process_logs.events(log_dir, "handed_over")
    field = "worker_id" if role == "prefill" else "decode_worker"
    own = [event["timestamp"] for event in handed_over if ready and event[field] == ready[0]["worker_id"]]
    if not own:
        return None
    return (datetime.fromisoformat(min(own)) - datetime.fromisoformat(ready[0]["timestamp"])).total_seconds()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_comes_under_load_has_work_within_seconds(
    tmp_path: Path, private_redis: RedisServer, role: str
) -> None:
    environ = {**ENVIRON, "PDQ_DECODE_WORKER__SIM_DECODE_MS": "20"}
    async with running(tmp_path, private_redis, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        async with constant_load(ledger, clients=12):
            await pdq(pipeline, "scale", f"{role}=2")

            async def idle() -> str:
                return "" if seconds_to_first_work(pipeline.log_dir, role) is not None else "it has none"

            await eventually(idle, limit_s=60, what="work of the new worker")
            seconds = seconds_to_first_work(pipeline.log_dir, role)

        print(f"{role}: work after {seconds:.2f} s")
        assert seconds is not None
        assert seconds <= TAKES_WORK_WITHIN_S
        ledger.all_right()
        await pipeline.quiet()


async def test_a_worker_drained_by_hand_finishes_and_is_not_started_again(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    unhurried = {**ENVIRON, "PDQ_PREFILL_WORKER__LEASE_S": "10"}  # a busy machine lets none of them run out
    async with running(tmp_path, private_redis, prefill=2, decode=2, environ=unhurried) as pipeline:
        ledger = Ledger(pipeline.client)
        gone = [next(name for name in await pipeline.workers() if name.startswith(r)) for r in ("prefill", "decode")]
        async with constant_load(ledger):
            for name in gone:
                assert "gone" in await pdq(pipeline, "drain", name)

            async def still_there() -> str:
                return "" if len(pipeline.deployment.children) == 3 else str(pipeline.deployment.children)

            await eventually(still_there, limit_s=60, what="end of the drained processes")
            assert "prefill=1 decode=1" in await pdq(pipeline, "scale")

        ledger.all_right()
        assert not process_logs.events(pipeline.log_dir, "request_migrated", "gateway-1")
        assert not process_logs.events(pipeline.log_dir, "leases_reaped")
        assert not set(gone) & set(await pipeline.workers())
        await all_there(pipeline, 3)
        await pipeline.quiet()


@pytest.mark.parametrize("way", ["command", "kill"])
@pytest.mark.parametrize("cycles", [2, pytest.param(15, marks=pytest.mark.long)])
async def test_cycles_of_more_and_fewer_workers_lose_no_request_and_leave_nothing_behind(
    tmp_path: Path, private_redis: RedisServer, cycles: int, way: str
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environ = {**ENVIRON, "TMPDIR": str(temporary)}
    async with running(tmp_path, private_redis, environ=environ, log_level="warning", timeout_s=120) as pipeline:
        ledger = Ledger(pipeline.client)
        await ledger.ask("warm up")
        before = traces(pipeline, tmp_path)
        most_consumers = 0
        async with constant_load(ledger):
            for cycle in range(cycles):
                role = ("prefill", "decode")[cycle % 2]
                await pdq(pipeline, "scale", f"{role}=4")
                await more_answers(ledger, 3 * NUM_CLIENTS)
                if way == "kill":
                    await pdq(pipeline, "scale", f"{role}=1", "--no-wait")
                    for number in (2, 3, 4):
                        with contextlib.suppress(StopIteration, ProcessLookupError):  # drained meanwhile
                            pid = pipeline.child(f"{role}-{number}").pid
                            assert pid is not None
                            os.kill(pid, signal.SIGKILL)
                await pdq(pipeline, "scale", f"{role}=1")
                most_consumers = max(most_consumers, len(await consumers(pipeline)))
                assert process_logs.faults(pipeline.log_dir) == []
                print(f"cycle {cycle + 1}: {len(ledger.lines)} requests, {len(await consumers(pipeline))} consumers")

        ledger.all_right()
        await pipeline.quiet(limit_s=HELD_S)

        async def names_of_the_dead() -> str:
            return ", ".join(await consumers_of_the_dead(pipeline))

        await eventually(names_of_the_dead, limit_s=60, what="consumers of living workers only")
        assert most_consumers <= 2 * 4
        after = traces(pipeline, tmp_path)
        print(f"{len(ledger.lines)} requests; {before.num_gateway_sockets} -> {after.num_gateway_sockets} gateway fds")
        assert after.num_processes == before.num_processes
        assert await lasting_keys(pipeline) == set()
        assert after.files == before.files
        assert list(temporary.iterdir()) == []
        assert len([name for name in os.listdir(pipeline.log_dir)]) <= 3 + 2 * 3
        await all_there(pipeline, 3)

        async def too_many_sockets() -> str:
            most, now = before.num_gateway_sockets + NUM_CLIENTS + 20, traces(pipeline, tmp_path).num_gateway_sockets
            return "" if now <= most else f"{now}, at most {most} are wanted"

        await eventually(too_many_sockets, limit_s=LINKS_IDLE_S, what="gateway without links to workers that are gone")
