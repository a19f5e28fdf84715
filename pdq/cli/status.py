"""`pdq status`: workers, queue and requests in flight of each served model, read from Redis."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from broker.base import QueueDepth, WorkerRecord
from broker.delivery import QueueSettings
from broker.errors import QueueUnavailable
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_queue import RedisPrefillQueue
from broker.redis_registry import RedisRegistry
from broker.redis_view import RequestView, queued_requests, served_models
from broker.registry_settings import RegistrySettings
from pdq.cli.run_folder import read_up
from pdq.runtime import logs
from pdq.runtime.settings import load

_ROLE_ORDER: Final = ("gateway", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSettings:
    served_model_name: str | None = field(default=None, metadata={"help": "one model; none: all that are served"})
    run_dir: Path = field(
        default=Path(".pdq"), metadata={"help": "without --redis: the folder of the `pdq up` to look at"}
    )
    max_requests: int = field(default=20, metadata={"help": "most requests to show per model"})
    redis: RedisSettings = field(default_factory=RedisSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One moment of one model."""

    model: str
    workers: tuple[WorkerRecord, ...]
    depth: QueueDepth
    requests: tuple[RequestView, ...]


def main(argv: Sequence[str]) -> int:
    loaded = load(StatusSettings, argv, prog="pdq status", description="Workers, queue and requests in flight.")
    settings = loaded.settings
    redis = settings.redis
    if loaded.origins["redis"] == "default":
        redis = dataclasses.replace(redis, redis=_redis_of_up(settings.run_dir) or redis.redis)
    logs.configure("error", json=False)
    try:
        found = asyncio.run(_read(settings, redis))
    except QueueUnavailable as error:
        print(f"pdq status: {error}; give --redis URL, or --run-dir of a running `pdq up`", file=sys.stderr)
        return 2
    console = Console(highlight=False)
    if not found:
        console.print(f"no model is served on {redis.redis.rpartition('@')[2]}")
    for status in found:
        show(console, status)
    return 0


def show(console: Console, status: ModelStatus) -> None:
    """Prints one model's tables."""
    depth = status.depth
    console.print(f"[bold]{status.model}[/]")
    console.print(
        f"queue: {depth.queued} queued, {depth.running} in prefill, {depth.dead} dead letters, "
        f"oldest waits {depth.oldest_wait_s:.1f} s"
    )
    console.print(_workers_table(status.workers))
    if status.requests:
        console.print(_requests_table(status.requests))


async def _read(settings: StatusSettings, redis: RedisSettings) -> list[ModelStatus]:
    calls = RedisCalls(redis, client_name="pdq-status")
    found: list[ModelStatus] = []
    try:
        await calls.start()
        name = settings.served_model_name
        for model in [name] if name else await served_models(calls):
            queue = RedisPrefillQueue(calls, model, QueueSettings())
            try:
                found.append(
                    ModelStatus(
                        model=model,
                        workers=await RedisRegistry(calls, model, RegistrySettings()).workers(),
                        depth=await queue.depth(),
                        requests=await queued_requests(calls, model, settings.max_requests),
                    )
                )
            finally:
                await queue.close()
    finally:
        await calls.close()
    return found


def _redis_of_up(run_dir: Path) -> str:
    """Of a deployment in this folder or of the demo in it; empty when there is none."""
    return next((str(up["redis"]) for path in (run_dir, run_dir / "demo") if (up := read_up(path)).get("redis")), "")


def _workers_table(workers: Sequence[WorkerRecord]) -> Table:
    """Fits into 80 columns; the role is the first part of a worker's id."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("address", overflow="fold")
    for name in ("run/wait/park", "free blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in sorted(workers, key=_order):
        counts, blocks = f"{worker.running}/{worker.waiting}/{worker.parked}", "-"
        if worker.total_blocks:
            blocks = f"{worker.free_blocks:,}/{worker.total_blocks:,}"
        table.add_row(
            worker.worker_id, worker.state, worker.http or worker.endpoint.removeprefix("tcp://"), counts, blocks
        )
    if not workers:
        table.add_row("none", *[""] * 4)
    return table


def _order(worker: WorkerRecord) -> tuple[int, str]:
    return (_ROLE_ORDER.index(worker.role) if worker.role in _ROLE_ORDER else len(_ROLE_ORDER), worker.worker_id)


def _requests_table(requests: Sequence[RequestView]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("request", "state", "worker"):
        table.add_column(name, overflow="fold")
    for name in ("gen.attempt", "tokens", "age"):
        table.add_column(name, justify="right")
    for request in requests:
        pair = f"{request.gen}.{request.attempt}"
        age = f"{request.age_s:.1f} s"
        table.add_row(request.request_id, request.state, request.worker, pair, f"{request.num_tokens:,}", age)
    return table
