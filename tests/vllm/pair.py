"""One prefill and one decode worker on real vLLM, which serve push and pull at once, and what they wrote down.

The engines take a minute to start, so tests share them. The mode travels with each request: a second gateway, told
another mode, makes pull requests for the same workers. A worker that a test kills stays away until the test starts one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import shlex
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import httpx
import psutil

from pdq.cli.children import BackOff, Child, stop_all
from pdq.cli.deployment import DeploymentSettings
from pdq.cli.gateway_client import is_ready
from pdq.cli.role_commands import RoleCommands
from pdq.runtime.model import ModelSettings
from tests.pipeline.harness import Pipeline, eventually, running
from tests.servers import RedisServer, free_port, redis_binary
from tests.vllm.prompts import LONG
from tests.vllm.records import Records
from tests.vllm.reference import BLOCK_SIZE, ENGINE_ARGS, ENVIRON, MODEL, Reference, reference

Mode = Literal["push", "pull"]
PREFILL_BLOCKS: Final = 112
DECODE_BLOCKS: Final = 96
"""KV space of the engines, which grows tight: two of the longest prompts have 94 blocks."""
_BLOCK_BYTES: Final = 46_080 * BLOCK_SIZE
_ALWAYS_LOGGED: Final = ("model_config_differs", "NUMA binding:")
"""At level error, see `_pull_gateway`; and what vLLM's kernels write to stderr."""
_START_S: Final = 600.0
_STOP_S: Final = 20.0
EVENT_S: Final = 300.0
"""The longest prompt takes 12 s of CPU, and a machine may have other things to do."""
_ANSWER_S: Final = 600.0
_PATIENT: Final = {
    # Two engines share two cores with the tests: a step may take seconds.
    "PDQ_GATEWAY__STALL_S": "120",
    "PDQ_PREFILL_WORKER__LEASE_S": "10",
    "PDQ_GATEWAY__OWNER_KV_WAIT_S": "300",
    "PDQ_PREFILL_WORKER__PREFILL_STALL_S": "120",
    "PDQ_PREFILL_WORKER__PARK_S": "36000",
    "PDQ_DECODE_WORKER__DECODE_STALL_S": "120",
}
_WORKERS: Final = {
    "VLLM_CONNECTOR": "tests.vllm.recording:RecordingConnector",
    "KV_BATCH_BYTES": str(8 << 20),
    "KV_WAIT_S": "300",
    "KV_LEASE_S": "30",
    "KV_ANSWER_TRIES": "30",
    "KV_HOLD_S": "36000",
}
"""For both kinds of worker. A long prompt's KV moves in several calls; tests hold it back for a while. A machine with
too much to do lets nobody count as dead. A prefill that nobody reads is freed because somebody says so, never by time.
"""


def engine_args(num_blocks: int) -> str:
    """What `--engine-args` takes."""
    values = {**ENGINE_ARGS, "kv_cache_memory_bytes": (num_blocks + 1) * _BLOCK_BYTES}
    flags = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    return shlex.join(flag if value is True else f"{flag}={value}" for flag, value in flags.items())


StartWorker = Callable[..., Awaitable[None]]
"""(role, module, environ): starts a worker beside those that there are. `module` and `environ`: what differs."""


@dataclass(slots=True, kw_only=True)
class Pair:
    pipelines: Mapping[Mode, Pipeline]
    """The same processes, seen through one gateway or the other."""
    records: Records
    reference: Reference
    decode_metrics_port: int
    start_worker: StartWorker
    workers: dict[str, Child]
    """Of each role, `prefill` and `decode`, the one that was started last."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def kill(self, role: str) -> None:
        """SIGKILL to the worker's process only. Its engine follows it, and moves KV until then: returns after that."""
        pid = self.workers[role].pid
        assert pid is not None
        followers = psutil.Process(pid).children(recursive=True)
        os.kill(pid, signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, followers, 60)
        assert not alive

    @property
    def push(self) -> Pipeline:
        return self.pipelines["push"]

    async def quiet(self) -> None:
        """Nothing is left of what was asked before; then the state of requests is forgotten."""
        self.records.release()
        await self.push.quiet(limit_s=120)
        if keys := [key async for key in self.push.redis.scan_iter("*:req:*")]:
            await self.push.redis.delete(*keys)

    async def forget_prefixes(self) -> None:
        """Other prompts, two of the longest, take the blocks of both prefix caches."""
        for _ in range(2):
            first_id = 3000 + next(self._numbers)
            await tokens(self.push, [first_id, *self.reference.prompts[LONG][1:]], 1)

    async def state(self, wanted: str) -> None:
        """Waits until the only request since `quiet` is in this state in Redis."""
        await self.states([wanted])

    async def states(self, wanted: list[str]) -> None:
        async def others() -> str:
            keys = [key async for key in self.push.redis.scan_iter("*:req:*")]
            found = sorted([(await self.push.redis.hget(key, "state") or b"").decode() for key in keys])
            return "" if found == sorted(wanted) else f"states {found}"

        await eventually(others, limit_s=EVENT_S, what=f"requests that are {wanted}")

    async def event(self, name: str, *, after: float, **wanted: object) -> dict[str, object]:
        """The first such record; waits for it."""

        async def missing() -> str:
            return "" if self.records.events(name, after=after, **wanted) else "none"

        await eventually(missing, limit_s=EVENT_S, what=f"record {name} {wanted}")
        return self.records.events(name, after=after, **wanted)[0]


async def tokens(pipeline: Pipeline, prompt: list[int], max_tokens: int, **more: object) -> list[int]:
    """Of one greedy completion."""
    answer = await pipeline.complete(prompt, max_tokens=max_tokens, return_token_ids=True, **more)
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@contextlib.asynccontextmanager
async def running_pair(folder: Path, model_dir: Path, *, allowed_faults: tuple[str, ...]) -> AsyncIterator[Pair]:
    """Ends with the check of all logs, see `harness.running`."""
    records = Records(folder / "records")
    environ = {**ENVIRON, **_PATIENT, **records.environ}
    for role in ("PREFILL_WORKER", "DECODE_WORKER"):
        environ |= {f"PDQ_{role}__{name}": value for name, value in _WORKERS.items()}
    environ["PDQ_PREFILL_WORKER__ENGINE_ARGS"] = engine_args(PREFILL_BLOCKS)
    environ["PDQ_DECODE_WORKER__ENGINE_ARGS"] = engine_args(DECODE_BLOCKS)
    environ["PDQ_PREFILL_WORKER__TAKE_TOKENS"] = "600"  # long prompts one at a time
    metrics_port = free_port()
    environ["PDQ_DECODE_WORKER__METRICS_PORT"] = str(metrics_port)
    environ["PDQ_DECODE_WORKER__EXPECTED_OUTPUT_TOKENS"] = "1"  # what more comes may preempt
    kept = await asyncio.to_thread(reference, model_dir)
    server = RedisServer(redis_binary(), folder)
    server.start()
    try:
        async with (
            running(
                folder,
                server,
                prefill=0,
                decode=0,
                engine="vllm",
                model=ModelSettings(model=MODEL),
                mode="push",
                environ=environ,
                timeout_s=_ANSWER_S,
                allowed_faults=(*_ALWAYS_LOGGED, *allowed_faults),
            ) as push,
            contextlib.AsyncExitStack() as children,
        ):
            told = push.deployment.settings
            workers: dict[str, Child] = {}

            async def start_worker(
                role: str, *, module: str | None = None, environ: Mapping[str, str] | None = None
            ) -> None:
                command = _commands(push, told).worker(role)
                if module:
                    command[command.index(f"{role}_worker")] = module
                num_before = sum(child.name.startswith(role) for child in started)
                worker = _child(push, f"{role}-{num_before + 1}", command, environ or {})
                started.append(worker)
                workers[role] = worker
                await children.enter_async_context(_running_child(worker))

            started: list[Child] = []
            for role in ("prefill", "decode"):
                await start_worker(role)
            await _ready(told.url, started)
            pull = await children.enter_async_context(_pull_gateway(push))
            try:
                yield Pair(
                    pipelines={"push": push, "pull": pull},
                    records=records,
                    reference=kept,
                    decode_metrics_port=metrics_port,
                    start_worker=start_worker,
                    workers=workers,
                )
            finally:
                await stop_all(started, _STOP_S)
    finally:
        server.kill()


@contextlib.asynccontextmanager
async def _pull_gateway(push: Pipeline) -> AsyncIterator[Pipeline]:
    """The model's mode in Redis is changed for its start: else it would refuse to serve. Then and later those who were
    told otherwise say so, and go on."""

    async def agree_on(mode: Mode) -> None:
        await push.redis.hset(push.key("config"), "mode", mode)
        await push.redis.persist(push.key("config"))

    await agree_on("pull")
    told = push.deployment.settings
    settings = dataclasses.replace(told, model=dataclasses.replace(told.model, mode="pull"), http_port=free_port())
    gateway = _child(push, "gateway-pull", _commands(push, settings).gateway(1), {})
    async with _running_child(gateway), httpx.AsyncClient(base_url=settings.url, timeout=_ANSWER_S) as client:
        await _ready(settings.url, [gateway])
        await agree_on("push")
        yield dataclasses.replace(push, client=client)


def _commands(push: Pipeline, settings: DeploymentSettings) -> RoleCommands:
    return RoleCommands(settings, redis_url=push.deployment.redis_url, role_flags=())


def _child(push: Pipeline, name: str, command: list[str], environ: Mapping[str, str]) -> Child:
    return Child(
        name,
        command,
        log_path=push.log_dir / f"{name}.log",
        environ={**push.environ, **environ},
        back_off=BackOff(min_s=3600, max_s=3600),
        on_change=lambda _: None,
    )


@contextlib.asynccontextmanager
async def _running_child(child: Child) -> AsyncIterator[None]:
    keeping = asyncio.create_task(child.keep_running())
    try:
        yield
    finally:
        await child.stop(_STOP_S)
        await keeping


async def _ready(url: str, children: list[Child]) -> None:
    """Until the gateway there serves. None of `children` may end before."""

    async def missing() -> str:
        ended = [child for child in children if child.state not in ("not started", "running")]
        assert not ended, "\n".join(child.log_tail() for child in ended)
        return "" if await asyncio.to_thread(is_ready, url) else "not ready"

    await eventually(missing, limit_s=_START_S, what=f"gateway that serves at {url}")
