"""What an operator sees with redis-cli while a request waits, and that a worker that comes later takes it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger
from tests.servers import RedisServer

LIMIT_S = 60.0
"""For what takes a second on an idle machine."""


async def redis_cli(server: RedisServer, *command: str) -> list[str]:
    """Its lines, as a person sees them in a pipe."""
    if shutil.which("redis-cli") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("redis-cli is missing")
        pytest.skip("redis-cli is missing")
    process = await asyncio.create_subprocess_exec(
        "redis-cli", "-p", str(server.port), *command, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return output.decode().splitlines()


def pairs(lines: list[str]) -> dict[str, str]:
    return dict(zip(lines[::2], lines[1::2], strict=True))


@contextlib.asynccontextmanager
async def prefill_worker(server: RedisServer) -> AsyncIterator[asyncio.subprocess.Process]:
    """By hand, as the README says, and up."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PDQ_")}
    command = [sys.executable, "-m", "prefill_worker", "--redis", server.url, "--model", "sim", "--engine", "sim"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environ
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            await _until_ready(process)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
        assert process.returncode == 0, output.decode()[-2000:]


async def _until_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    lines = []
    while raw := await process.stdout.readline():
        lines.append(raw.decode())
        if raw.startswith(b"{") and json.loads(raw)["event"] == "ready":
            return
    raise AssertionError("".join(lines))


async def queued(pipeline: Pipeline, count: int) -> None:
    async def missing() -> str:
        number = await pipeline.redis.zcard(pipeline.key("ready"))
        return "" if number == count else f"ZCARD {number}"

    await eventually(missing, limit_s=LIMIT_S, what=f"{count} queued requests")


async def test_a_waiting_request_can_be_read_and_is_taken_by_a_worker_that_comes_later(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis, prefill=0, decode=1) as pipeline:
        ledger = Ledger(pipeline.client)
        asking = asyncio.create_task(ledger.ask("who waits for whom?", max_tokens=7))
        await queued(pipeline, 1)

        stream = await redis_cli(private_redis, "XRANGE", "pdq:{sim}:prefill", "-", "+")
        entry_id, entry = stream[0], pairs(stream[1:])
        assert entry["tokens"] == str(len("who waits for whom?"))
        assert entry["gen"] == "1"
        assert entry["mode"] == "pull"
        assert entry["gateway"].startswith("tcp://127.0.0.1:")
        assert entry["id"].isalnum()
        assert all(text.isprintable() for line in stream for text in line)

        ready = pairs(await redis_cli(private_redis, "ZRANGE", "pdq:{sim}:ready", "0", "-1", "WITHSCORES"))
        assert list(ready) == [entry_id]
        assert float(ready[entry_id]) == pytest.approx(time.time() * 1000, abs=60_000)
        assert float(ready[entry_id]) == float(entry["due"])

        request = pairs(await redis_cli(private_redis, "HGETALL", f"pdq:{{sim}}:req:{entry['id']}:1"))
        assert request["state"] == "queued"
        assert request["attempt"] == "0"
        assert request["entry"] == entry_id
        assert request["worker"] == ""

        assert (await redis_cli(private_redis, "SMEMBERS", "pdq:models")) == ["sim"]
        assert (await redis_cli(private_redis, "XPENDING", "pdq:{sim}:prefill", "prefill"))[0] == "0"

        async with prefill_worker(private_redis):
            async with asyncio.timeout(LIMIT_S):
                line = await asking

            ledger.all_right()
            assert line.text == "who wai"
            await pipeline.quiet()  # the client has its answer before the queue hears of the hand-over
            request = pairs(await redis_cli(private_redis, "HGETALL", f"pdq:{{sim}}:req:{entry['id']}:1"))
            assert request["state"] == "decoding"
            assert request["attempt"] == "1"
            assert request["worker"].startswith("prefill-")
            assert request["decode"].startswith("decode-")
            assert await redis_cli(private_redis, "TTL", f"pdq:{{sim}}:req:{entry['id']}:1") != ["-1"]
            assert await redis_cli(private_redis, "EXISTS", f"pdq:{{sim}}:job:{entry['id']}:1") == ["0"]


async def test_every_worker_has_a_record_that_can_be_read(tmp_path: Path, private_redis: RedisServer) -> None:
    async with running(tmp_path, private_redis) as pipeline:
        records: list[dict[str, str]] = []

        async def incomplete() -> str:
            """A record lives for 3 s, and a busy machine's process may be late with the next one."""
            names = await redis_cli(private_redis, "ZRANGE", "pdq:{sim}:workers", "0", "-1")
            found = [pairs(await redis_cli(private_redis, "HGETALL", f"pdq:{{sim}}:worker:{name}")) for name in names]
            records[:] = filter(None, found)
            return "" if len(records) == 3 else f"{len(records)} records"

        await eventually(incomplete, limit_s=LIMIT_S, what="records")
        assert sorted(record["role"] for record in records) == ["decode", "gateway", "prefill"]
        assert {record["state"] for record in records} == {"ready"}
        assert all(record["endpoint"].startswith("tcp://") for record in records)
        fingerprints = {record["fingerprint"] for record in records if record["role"] != "gateway"}
        assert len(fingerprints) == 1
        assert "block_size=16" in fingerprints.pop()
        await pipeline.quiet()


async def test_shorter_prompts_are_taken_first_and_every_waiting_one_is_answered(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    environ = {"PDQ_GATEWAY__PREFILL_MS_PER_TOKEN": "20"}  # so that it is no matter how late they come
    async with running(tmp_path, private_redis, prefill=0, decode=1, environ=environ) as pipeline:
        ledger = Ledger(pipeline.client)
        async with asyncio.TaskGroup() as group:
            asking = []
            for number, length in enumerate((3000, 20, 1000, 20), start=1):
                asking.append(group.create_task(ledger.ask(f"{number} " * (length // 2), max_tokens=8)))
                await queued(pipeline, number)
            due = await pipeline.redis.zrange(pipeline.key("ready"), 0, -1)
            tokens = [
                int(dict((await pipeline.redis.xrange(pipeline.key("prefill"), i, i))[0][1])[b"tokens"]) for i in due
            ]
            assert tokens == sorted(tokens)
            async with prefill_worker(private_redis):
                await asyncio.wait(asking, timeout=LIMIT_S)
        ledger.all_right()
        await pipeline.quiet()
