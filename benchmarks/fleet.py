"""Real processes for one dispatch arm: Redis, one gateway, prefill workers with a speed each, one decode worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import redis.asyncio

from pdq.cli.children import BackOff, Child, stop_all
from pdq.cli.gateway_client import is_ready
from pdq.cli.redis_server import server_command, wait_until_serving
from pdq.runtime.ports import free_port

_START_LIMIT_S = 120.0
_STOP_S = 20.0
CHUNK_TOKENS = 2048
_BLOCK_TOKENS = 256
_NUM_BLOCKS = 4096
_FAULTS = ('"warning"', '"error"', "prog", "can't start", "python -m")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTime:
    """The simulated device's formula; per chunk the fixed part, over the prompt a line and a square."""

    fixed_ms: float
    token_ms: float
    square_ms: float

    def slower(self, factor: float) -> PrefillTime:
        return PrefillTime(
            fixed_ms=self.fixed_ms * factor, token_ms=self.token_ms * factor, square_ms=self.square_ms * factor
        )

    def seconds(self, num_tokens: int) -> float:
        num_chunks = -(-num_tokens // CHUNK_TOKENS)
        return (self.fixed_ms * num_chunks + self.token_ms * num_tokens + self.square_ms * num_tokens**2) / 1000

    def flags(self) -> list[str]:
        return [
            f"--sim-prefill-ms={self.fixed_ms}",
            f"--sim-prefill-token-ms={self.token_ms}",
            f"--sim-prefill-square-ms={self.square_ms}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of dispatching. `policy` empty: pdq's queue; else one of `pushing_gateway.POLICIES`."""

    name: str
    policy: str = ""
    gateway_flags: tuple[str, ...] = ()
    worker_flags: tuple[str, ...] = ()


_IN_ORDER: Final = ("--due-factor=0",)
"""First come, first served."""
ARMS = {
    arm.name: arm
    for arm in (
        Arm(name="pdq"),
        Arm(name="pdq factor 1", gateway_flags=("--due-factor=1",)),
        Arm(name="pdq ahead", worker_flags=("--take-ahead-s=1000",)),
        Arm(name="pdq fifo", gateway_flags=_IN_ORDER),
        Arm(name="round robin", policy="round_robin", gateway_flags=_IN_ORDER),
        Arm(name="two choices", policy="two_choices", gateway_flags=_IN_ORDER),
        Arm(name="least loaded", policy="least_loaded", gateway_flags=_IN_ORDER),
    )
}


@dataclass(slots=True, kw_only=True)
class Fleet:
    port: int
    _pids: list[int]

    def cpu_s(self) -> float:
        """CPU time of all its processes so far."""
        total = 0.0
        for pid in self._pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid)
                for process in [parent, *parent.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        times = process.cpu_times()
                        total += times.user + times.system
        return total


@contextlib.asynccontextmanager
async def running(arm: Arm, speeds: Sequence[PrefillTime], *, mode: str) -> AsyncIterator[Fleet]:
    """Ready to serve: every worker is registered. `speeds`: one per prefill worker."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PDQ_")}  # noqa: TID251 - handed on
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        redis_port, http_port = free_port(), free_port()
        url = f"redis://127.0.0.1:{redis_port}/0"
        roles = _commands(arm, speeds, ["--redis", url, "--mode", mode, "--log-level", "warning"], http_port)
        async with contextlib.AsyncExitStack() as stack:
            server = {"redis": server_command(folder / "redis", redis_port)}
            children = await stack.enter_async_context(_children(server, inherited, folder))
            await wait_until_serving(redis_port, _START_LIMIT_S)
            children += await stack.enter_async_context(_children(roles, inherited, folder))
            try:
                async with asyncio.timeout(_START_LIMIT_S):
                    await _registered(url, len(roles))
                    while not await asyncio.to_thread(is_ready, f"http://127.0.0.1:{http_port}"):  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                yield Fleet(port=http_port, _pids=[child.pid for child in children if child.pid])
            finally:
                for child in children[1:]:
                    if any(word in child.log_path.read_text(errors="replace") for word in _FAULTS):
                        print(f"--- {child.name}\n{child.log_tail()[-3000:]}", file=sys.stderr)


def _commands(arm: Arm, speeds: Sequence[PrefillTime], common: list[str], http_port: int) -> dict[str, list[str]]:
    python = [sys.executable, "-m"]
    sizes = [f"--block-size={_BLOCK_TOKENS}", f"--num-blocks={_NUM_BLOCKS}", "--sim-kv-bytes-per-token=32"]
    sizes += [f"--max-num-batched-tokens={CHUNK_TOKENS}"]
    gateway = ["benchmarks.pushing_gateway", arm.policy, str(len(speeds))] if arm.policy else ["gateway"]
    commands = {
        "gateway": [*python, *gateway, *common, f"--http-port={http_port}", "--local-max-tokens=0", *arm.gateway_flags],
        "decode": [*python, "decode_worker", *common, *sizes],
    }
    for number, speed in enumerate(speeds):
        worker = ["benchmarks.pushed_worker", str(number)] if arm.policy else ["prefill_worker"]
        commands[f"prefill-{number}"] = [*python, *worker, *common, *sizes, *speed.flags(), *arm.worker_flags]
    return commands


@contextlib.asynccontextmanager
async def _children(
    commands: Mapping[str, list[str]], environ: Mapping[str, str], folder: Path
) -> AsyncIterator[list[Child]]:
    """A process that ends by itself is not started again: the run is void."""
    children = [
        Child(
            name,
            command,
            log_path=folder / f"{name}.log",
            environ=environ,
            back_off=BackOff(min_s=3600, max_s=3600),
            on_change=lambda _: None,
        )
        for name, command in commands.items()
    ]
    for child in children:
        child.log_path.touch()
    tasks = [asyncio.create_task(child.keep_running()) for child in children]
    try:
        yield children
    finally:
        await stop_all(children, _STOP_S)
        await asyncio.gather(*tasks, return_exceptions=True)


async def _registered(url: str, num_processes: int) -> None:
    """Until so many processes of the model `sim` are in the registry."""
    store = redis.asyncio.from_url(url)
    try:
        while await store.zcard("pdq:{sim}:workers") < num_processes:  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.1)
    finally:
        await store.aclose()
