"""A whole deployment for tests: real processes, real sockets, a real server; what they leave behind is checked.

`Pipeline` starts everything through the same code as `pdq up`. `quiet` waits until nothing is queued or leased and
every KV pool is back at its start level.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import redis.asyncio

from pdq.cli.children import Child
from pdq.cli.deployment import Deployment, DeploymentSettings
from pdq.runtime.model import ModelSettings
from tests.pipeline import process_logs
from tests.servers import RedisServer, free_ports, redis_binary

START_LIMIT_S = 150.0
_DEFAULTS = {"PDQ_GATEWAY__LOCAL_MAX_TOKENS": "0"}


@dataclass(slots=True)
class Pipeline:
    deployment: Deployment
    redis: redis.asyncio.Redis
    client: httpx.AsyncClient
    model: str
    log_dir: Path
    environ: Mapping[str, str]
    """Of every process."""

    @property
    def url(self) -> str:
        return self.deployment.settings.url

    @property
    def port(self) -> int:
        return self.deployment.settings.http_port

    def key(self, name: str) -> str:
        return f"pdq:{{{self.model}}}:{name}"

    def child(self, name: str) -> Child:
        """`gateway-1`, `prefill-2`, ..."""
        return next(child for child in self.deployment.children if child.name == name)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Of the role's process only; its engine follows it."""
        pid = self.child(name).pid
        assert pid is not None
        os.kill(pid, number)

    async def complete(self, prompt: object, *, max_tokens: int = 16, **more: object) -> dict[str, Any]:
        """One greedy completion that must succeed."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def workers(self) -> dict[str, dict[str, str]]:
        """Registry records by worker id."""
        names = await self.redis.zrange(self.key("workers"), 0, -1)
        records = {}
        for name in names:
            record = await self.redis.hgetall(self.key(f"worker:{name.decode()}"))
            if record:
                records[name.decode()] = {key.decode(): value.decode() for key, value in record.items()}
        return records

    async def quiet(self, *, limit_s: float = 20.0) -> None:
        """Fails when work, leases or KV blocks are left after `limit_s`. Believes heartbeats newer than the call."""
        seconds, microseconds = await self.redis.time()
        called_at_ms = seconds * 1000 + microseconds // 1000

        async def leftovers() -> str:
            found = []
            for name, beat_at_ms in await self.redis.zrange(self.key("workers"), 0, -1, withscores=True):
                if beat_at_ms <= called_at_ms and await self.redis.exists(self.key(f"worker:{name.decode()}")):
                    found.append(f"{name.decode()}: no heartbeat yet")
            if queued := await self.redis.zcard(self.key("ready")):
                found.append(f"ZCARD {queued}")
            if entries := await self.redis.xlen(self.key("prefill")):
                found.append(f"XLEN {entries}")
            with contextlib.suppress(redis.exceptions.ResponseError):
                if pending := (await self.redis.xpending(self.key("prefill"), "prefill"))["pending"]:
                    found.append(f"XPENDING {pending}")
            for name, record in (await self.workers()).items():
                if record["role"] != "gateway" and record["free_blocks"] != record["total_blocks"]:
                    found.append(f"{name}: {record['free_blocks']} of {record['total_blocks']} blocks free")
            return "; ".join(found)

        await eventually(leftovers, limit_s=limit_s, what="a quiet pipeline")


async def eventually(problem: Callable[[], Awaitable[str]], *, limit_s: float, what: str) -> None:
    """Asks until `problem` returns an empty text; fails with the last text."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while text := await problem():
        if loop.time() > deadline:
            raise AssertionError(f"no {what} within {limit_s} s: {text}")
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def running(
    folder: Path,
    server: RedisServer | None,
    *,
    gateways: int = 1,
    prefill: int = 1,
    decode: int = 1,
    engine: str = "sim",
    model: ModelSettings | None = None,
    mode: Literal["push", "pull", "local"] = "pull",
    environ: Mapping[str, str] | None = None,
    log_level: str = "info",
    timeout_s: float = 120.0,
    start_limit_s: float = START_LIMIT_S,
    restart_s: tuple[float, float] = (0.5, 30.0),
    allowed_faults: tuple[str, ...] = (),
    noise_lines: int = process_logs.NOISE_LINES,
) -> AsyncIterator[Pipeline]:
    """`server` None: the embedded one. `restart_s`: first and longest delay before a dead process starts again.
    `environ`: settings as PDQ_... variables, scoped ones for one role.

    Short prompts go through the queue like all others, unless `environ` says otherwise.

    Without prefill or decode workers it is up when they are all that the gateway misses. At the end no process may have
    logged an error, a traceback or spam, but for events and texts in `allowed_faults`.
    """
    settings = DeploymentSettings(
        gateways=gateways,
        prefill=prefill,
        decode=decode,
        engine=engine,
        model=dataclasses.replace(model or ModelSettings(), mode=mode),
        redis=server.url if server else None,
        http_port=free_ports(gateways),
        run_dir=folder / "run",
        log_level=log_level,
        restart_min_s=restart_s[0],
        restart_max_s=restart_s[1],
    )
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PDQ_")}
    full_environ = {**inherited, "PYTHONUNBUFFERED": "1", **_DEFAULTS, **(environ or {})}
    deployment = Deployment(settings, environ=full_environ)
    async with deployment:
        try:
            async with asyncio.timeout(start_limit_s):
                if prefill and decode:
                    await deployment.wait_until_ready()
                else:
                    await _wait_until_only_workers_are_missing(settings.url)
        except BaseException:
            print_logs(folder / "run")
            raise
        client = httpx.AsyncClient(base_url=settings.url, timeout=timeout_s, limits=httpx.Limits(max_connections=None))
        store = redis.asyncio.from_url(deployment.redis_url)
        try:
            name, log_dir = settings.served_model.name, deployment.folder.log_dir
            yield Pipeline(deployment, store, client, name, log_dir, full_environ)
        except BaseException:
            print_logs(folder / "run")
            raise
        finally:
            await client.aclose()
            await store.aclose()
    found = process_logs.faults(deployment.folder.log_dir, allowed=allowed_faults, noise_lines=noise_lines)
    assert not found, "\n".join(found[:10])


@contextlib.asynccontextmanager
async def shared(folder: Path, **settings: Any) -> AsyncIterator[Pipeline]:
    """For several tests, with a server of its own; quiet at the end. `settings`: as for `running`."""
    server = RedisServer(redis_binary(), folder)
    server.start()
    try:
        async with running(folder, server, **settings) as pipeline:
            yield pipeline
            await pipeline.quiet()
    finally:
        server.kill()


async def _wait_until_only_workers_are_missing(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:

        async def missing() -> str:
            try:
                response = await client.get("/ready")
            except httpx.HTTPError as error:
                return repr(error)
            reasons = set(response.json().get("reasons", ()))
            return "" if reasons <= {"no_prefill_worker", "no_decode_worker"} else response.text

        await eventually(missing, limit_s=START_LIMIT_S, what="gateway")


def print_logs(folder: Path) -> None:
    """The last lines of each process, for the test's report."""
    for path in sorted(folder.rglob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        print(f"--- {path.name}", *lines[-25:], sep="\n")
