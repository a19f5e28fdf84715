"""`pdq drain WORKER_ID`: a worker on any host finishes what it has and ends; waits until it is gone.

The id may be cut short as long as it is clear. A `pdq up` that runs the worker wants one less from then on. Exit code 0
gone, 1 still there after the limit, 2 no such worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from broker.base import WorkerRecord
from broker.redis_registry import RedisRegistry
from broker.redis_scale import RedisScale
from broker.registry_settings import RegistrySettings
from pdq.cli.store import CommandFailed, Store, StoreSettings, run_with_store
from pdq.runtime.settings import load

_PACE_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainSettings:
    wait: bool = field(default=True, metadata={"help": "wait until the worker is gone"})
    wait_limit_s: float = field(default=120.0, metadata={"help": "longest such wait"})
    store: StoreSettings = field(default_factory=StoreSettings)


def main(argv: Sequence[str]) -> int:
    start = argv[0] if argv and not argv[0].startswith("-") else ""
    loaded = load(
        DrainSettings,
        argv[1:] if start else argv,
        prog="pdq drain",
        description="A worker finishes what it has and ends: pdq drain WORKER_ID (or its unique start).",
    )
    settings = loaded.settings

    async def drain(store: Store) -> int:
        model, worker = await _find(store, start)
        scale = RedisScale(store.calls, model, RegistrySettings())
        row = next((row for row in await scale.rows() if row.state.runs(worker.worker_id)), None)
        kept_by = row if row is not None and worker.role != "gateway" else None
        if not await scale.drain(worker, kept_by):
            raise CommandFailed(f"{worker.worker_id} has gone meanwhile", 2)
        print(f"{worker.worker_id}: asked to drain{_consequence(worker, row is not None)}", flush=True)
        return await _until_gone(store, worker, settings.wait_limit_s) if settings.wait else 0

    return run_with_store("pdq drain", loaded, settings.store, drain)


def _registry(store: Store, model: str) -> RedisRegistry:
    """A new one for each look: one that is kept goes on showing those that it knew after a gap in Redis's answers."""
    return RedisRegistry(store.calls, model, RegistrySettings())


async def _find(store: Store, start: str) -> tuple[str, WorkerRecord]:
    """Model and worker whose id begins so. Raises CommandFailed when there is none or more than one."""
    found: list[tuple[str, WorkerRecord]] = []
    known: list[str] = []
    for model in await store.models():
        for worker in await _registry(store, model).workers():
            known.append(worker.worker_id)
            if start and worker.worker_id.startswith(start):
                found.append((model, worker))
    exact = [one for one in found if one[1].worker_id == start] or found
    if len(exact) == 1:
        return exact[0]
    names = [worker.worker_id for _, worker in found] or known
    problem = f"{len(found)} workers begin with {start!r}" if found else f"no worker begins with {start!r}"
    if not start:
        problem = "give a WORKER_ID"
    raise CommandFailed(f"{problem}; there are: {', '.join(sorted(names)) or 'none'}", 2)


def _consequence(worker: WorkerRecord, is_kept_running: bool) -> str:
    if not is_kept_running:
        return ""
    if worker.role == "gateway":
        return "; its `pdq up` starts a gateway again"
    return f"; its `pdq up` wants one {worker.role} worker less now"


async def _until_gone(store: Store, asked: WorkerRecord, limit_s: float) -> int:
    started_at, said = time.monotonic(), ""
    while True:
        registry = _registry(store, asked.model)
        worker = next((one for one in await registry.workers() if one.worker_id == asked.worker_id), None)
        passed_s = time.monotonic() - started_at
        line = "gone"
        if worker is not None:
            line = f"{worker.state}: running {worker.running}, waiting {worker.waiting}, parked {worker.parked}"
            if worker.state == "ready":
                await registry.ask_to_drain(worker.worker_id)  # again: the wish goes with a key whose TTL runs out
        if line != said:
            print(f"{passed_s:6.1f} s  {line}", flush=True)
            said = line
        if worker is None:
            return 0
        if passed_s > limit_s:
            raise CommandFailed(f"{worker.worker_id} is still there after {limit_s:g} s; it goes on draining")
        await asyncio.sleep(_PACE_S)
