"""What a deployment has beside its data: to be the same before and after, in Redis and in the processes that lived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psutil

from tests.pipeline.harness import Pipeline

FIXED_KEYS: Final = frozenset({"prefill", "ready", "tenants", "wake", "dead", "clock", "config", "workers"})
"""One of each per model, however many workers there were."""


async def lasting_keys(pipeline: Pipeline) -> set[str]:
    """That no TTL will end, but for the fixed ones."""
    names = [raw.decode() async for raw in pipeline.redis.scan_iter()]
    fixed = {pipeline.key(name) for name in FIXED_KEYS} | {"pdq:models"}
    return {name for name in names if name not in fixed and await pipeline.redis.pttl(name) == -1}


async def consumers(pipeline: Pipeline) -> set[str]:
    """Names in the queue's group, the reaper's apart."""
    found = await pipeline.redis.xinfo_consumers(pipeline.key("prefill"), "prefill")
    return {consumer["name"].decode() for consumer in found} - {"-"}


async def consumers_of_the_dead(pipeline: Pipeline) -> set[str]:
    return await consumers(pipeline) - set(await pipeline.workers())


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFiles:
    """File descriptors, sockets among them, by (process, pid)."""

    numbers: Mapping[tuple[str, int], int]

    def leaks(self, after: OpenFiles, *, spare: int) -> list[str]:
        """Processes that were there before and have more than `spare` more of them."""
        return [
            f"{name} (pid {pid}): {self.numbers[name, pid]} -> {number} file descriptors"
            for (name, pid), number in after.numbers.items()
            if number > self.numbers.get((name, pid), number) + spare
        ]


def open_files(pipeline: Pipeline) -> OpenFiles:
    """Of every role's process and every engine."""
    numbers: dict[tuple[str, int], int] = {}
    for child in pipeline.deployment.children:
        if child.pid is not None:
            process = psutil.Process(child.pid)
            numbers[child.name, child.pid] = process.num_fds()
            numbers |= {(f"{child.name} engine", engine.pid): engine.num_fds() for engine in process.children()}
    return OpenFiles(numbers=numbers)
