from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.base import PrefillJob, WorkerRecord
from broker.delivery import QueueSettings
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_queue import RedisPrefillQueue
from broker.redis_registry import RedisRegistry
from broker.registry_settings import RegistrySettings
from pdq.cli.main import main
from pdq.cli.redis_server import server_command, wait_until_serving
from pdq.cli.run_folder import RunFolder
from pdq.wire.types import SamplingParams, pack_ids
from tests.broker.stores import PATIENCE, TTL_S
from tests.cli.conftest import LIMIT_S
from tests.cli.operators import lasting_heartbeat

P = "prefill-host-1-abc"


@pytest.fixture
def redis_url(tmp_path: Path, port: int) -> Iterator[str]:
    server = subprocess.Popen(server_command(tmp_path / "redis", port), stdout=subprocess.DEVNULL)
    try:
        asyncio.run(wait_until_serving(port, LIMIT_S))
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait(LIMIT_S)


async def fill(url: str) -> None:
    """A prefill worker that has one of two jobs."""
    calls = RedisCalls(RedisSettings(redis=url, **PATIENCE), client_name="test")
    await calls.start()
    queue = RedisPrefillQueue(calls, "tiny", QueueSettings())
    try:
        record = WorkerRecord(
            worker_id=P,
            role="prefill",
            state="ready",
            endpoint="tcp://127.0.0.1:4001",
            model="tiny",
            fingerprint="block_size=16",
            total_blocks=1000,
            free_blocks=900,
            running=1,
        )
        await lasting_heartbeat(calls, RedisRegistry(calls, "tiny", RegistrySettings(registry_ttl_s=TTL_S)), record)
        for name in ("first", "second"):
            job = PrefillJob(
                request_id=name,
                gen=1,
                prompt_ids=pack_ids(range(1234)),
                generated_ids=b"",
                sampling=SamplingParams(max_tokens=3),
                deadline_s=60.0,
                gateway="tcp://127.0.0.1:4000",
                gateway_id="gateway-host-2-def",
                mode="pull",
            )
            await queue.enqueue(job)
        await queue.take(P, max_tokens=10_000, max_jobs=1)
    finally:
        await queue.close()
        await calls.close()


def rows(printed: str) -> list[list[str]]:
    return [line.split() for line in printed.splitlines()]


def test_status_shows_workers_queue_and_requests(
    redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    asyncio.run(fill(redis_url))

    code = main(["status", "--redis", redis_url])

    printed = capsys.readouterr().out
    assert code == 0
    assert "tiny" in printed
    assert "queue: 1 queued, 1 in prefill, 0 dead letters" in printed
    assert [P, "ready", "127.0.0.1:4001", "1/0/0", "900/1,000"] in rows(printed)
    assert ["first", "prefill", P, "1.1", "1,234"] in [row[:5] for row in rows(printed)]
    assert ["second", "queued", "1.0", "1,234"] in [row[:4] for row in rows(printed)]


def test_status_finds_the_redis_of_a_running_deployment(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder(tmp_path / "demo") as folder:
        folder.write_up({"redis": redis_url})

        code = main(["status", "--run-dir", str(tmp_path)])

    assert code == 0
    assert "no model is served on" in capsys.readouterr().out


def test_without_a_redis_status_says_what_to_give(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["status", "--redis", f"redis://127.0.0.1:{port}/0"])

    assert code == 2
    assert "--redis URL" in capsys.readouterr().err
