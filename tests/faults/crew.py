"""One prefill and one decode worker for the tests of a module, so slow that a request can be met in each of its phases.

What they hold is read from their own metrics, which no heartbeat delays.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.faults import invariants
from tests.faults.stage import Stage, Worker, staged
from tests.pipeline.harness import Pipeline, eventually
from tests.pipeline.test_worker_metrics import scrape
from tests.servers import free_port

SLOW_PREFILL = ("--max-num-batched-tokens", "64", "--max-num-seqs", "64", "--sim-prefill-ms", "50")
"""64 tokens a step, and a step is not cut short: an abort waits for its end."""
SLOW_KV = ("--sim-kv-gbps", "0.001", "--kv-batch-bytes", "16384", "--kv-direct-bytes", "0")
"""125 tokens a second, a block at a time."""
SLOW_DECODE = ("--sim-decode-ms", "50")
UNHURRIED = ("--lease-s", "30")
"""Nobody dies here: a lease that runs out on a busy machine, or at a point, is no crew's matter."""
PREFILL_POINTS = ("before take", "claimed", "before settle", "half written")
DECODE_POINTS = ("half read",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What there is of requests, in the queue and at both workers."""

    queued: int
    leased: int
    entries: int
    prefills: float
    """That the engine computes, or will."""
    decodes: float
    """That the engine decodes, or that wait for their KV."""
    prefill_blocks: float
    decode_blocks: float
    """Promised or used, or not given back yet."""

    @property
    def is_nothing(self) -> bool:
        return not any((self.queued, self.leased, self.entries, self.prefills, self.decodes)) and not any(
            (self.prefill_blocks, self.decode_blocks)
        )


@dataclass(slots=True, kw_only=True)
class Crew:
    pipeline: Pipeline
    stage: Stage
    prefill: Worker
    decode: Worker
    prefill_port: int
    decode_port: int

    async def held(self) -> Held:
        redis, key = self.pipeline.redis, self.pipeline.key
        prefill, decode = await asyncio.gather(scrape(self.prefill_port), scrape(self.decode_port))
        return Held(
            queued=await redis.zcard(key("ready")),
            leased=(await redis.xpending(key("prefill"), "prefill"))["pending"],
            entries=await redis.xlen(key("prefill")),
            prefills=prefill["pdq_prefill_running"],
            decodes=decode["pdq_decode_running"] + decode["pdq_decode_waiting"],
            prefill_blocks=prefill["pdq_kv_blocks_total"] - prefill["pdq_kv_blocks_free"],
            decode_blocks=decode["pdq_kv_blocks_total"] - decode["pdq_kv_blocks_free"],
        )

    async def prefilled(self) -> float:
        """Prompts that the prefill engine has computed so far."""
        return (await scrape(self.prefill_port))["pdq_prefill_seconds_count"]

    async def decoding(self) -> tuple[float, float]:
        """Requests that (decode, wait for their KV or for room)."""
        figures = await scrape(self.decode_port)
        return figures["pdq_decode_running"], figures["pdq_decode_waiting"]

    async def states(self) -> list[str]:
        """Of the requests that Redis knows."""
        keys = [key async for key in self.pipeline.redis.scan_iter(self.pipeline.key("req:*"))]
        return sorted([(await self.pipeline.redis.hget(key, "state")).decode() for key in keys])

    async def freed(self, *, limit_s: float) -> float:
        """Waits until nothing is held by anybody; how long it took."""
        started_at = asyncio.get_running_loop().time()

        async def left_over() -> str:
            held = await self.held()
            return "" if held.is_nothing else str(held)

        await eventually(left_over, limit_s=limit_s, what="free workers")
        return asyncio.get_running_loop().time() - started_at


@contextlib.asynccontextmanager
async def hired(
    pipeline: Pipeline, folder: Path, *, prefill_flags: Iterable[str], decode_flags: Iterable[str]
) -> AsyncIterator[Crew]:
    """They pass all their points until the test holds one (`crew.prefill.hold`)."""
    async with staged(pipeline, folder) as stage:
        ports = free_port(), free_port()
        prefill = await stage.spawn(
            "prefill", *UNHURRIED, *prefill_flags, "--metrics-port", str(ports[0]), stops_at=PREFILL_POINTS
        )
        decode = await stage.spawn("decode", *decode_flags, "--metrics-port", str(ports[1]), stops_at=DECODE_POINTS)
        prefill.let()
        decode.let()
        await stage.serving(prefill, decode)
        await stage.ready()
        yield Crew(
            pipeline=pipeline,
            stage=stage,
            prefill=prefill,
            decode=decode,
            prefill_port=ports[0],
            decode_port=ports[1],
        )
        await stage.drain()
        invariants.clean_logs(stage)


@contextlib.asynccontextmanager
async def judged(crew: Crew) -> AsyncIterator[invariants.Books]:
    """Around one test: nothing is known of the requests before, and the books are right at the end.

    What a test leaves running is ended: if it has failed, the next one must not fail with it.
    """
    before = asyncio.all_tasks()
    if keys := [key async for key in crew.pipeline.redis.scan_iter(crew.pipeline.key("req:*"))]:
        await crew.pipeline.redis.delete(*keys)
    books = await invariants.open_books(crew.pipeline)
    try:
        yield books
    finally:
        crew.prefill.let()
        crew.decode.let()
        await invariants.nobody_asks(before)
    await books.closed()
