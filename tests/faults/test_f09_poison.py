"""F9: a prompt that brings its worker down, again and again: it is given up, its client is told, and nobody else is."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.invariants import request_hashes
from tests.faults.stage import Stage
from tests.pipeline.harness import eventually
from tests.pipeline.ledger import Ledger

pytestmark = pytest.mark.asyncio(loop_scope="package")
MAX_FAILURES = 3
NUM_INNOCENT = 12
FLAGS = (
    *("--sim-directives", "--max-failures", str(MAX_FAILURES), "--sim-prefill-ms", "500", "--take-ahead-s", "60"),
    *("--lease-s", "20"),
)
"""Slow, and eager: who has measured himself takes many jobs at once, and computes them in one step. No lease runs out:
that would count as a failure, too."""


@pytest.mark.parametrize("pipeline", ["push"], indirect=True)
async def test_a_prompt_that_kills_its_workers_ends_alone(stage: Stage, ledger: Ledger) -> None:
    stage.allowed_faults = ("crash_directive", "the engine process ended")
    await stage.spawn("decode")
    workers = [await stage.spawn("prefill", *FLAGS, stops_at=["before take"]) for _ in range(MAX_FAILURES + 1)]
    await stage.serving(*stage.workers)
    await stage.ready()
    for worker in workers:
        worker.let()
        await asyncio.gather(*(ledger.ask(f"{worker.name} measures itself {number}") for number in range(3)))
        await stage.no_more_takes(worker)

    others = [asyncio.create_task(ledger.ask(f"{number} is innocent " * 3)) for number in range(NUM_INNOCENT)]
    await _queued(stage, NUM_INNOCENT)
    asking = asyncio.create_task(ledger.ask("!crash on me " * 20, stream=True))  # long: after the others
    await _queued(stage, NUM_INNOCENT + 1)
    for worker in workers[:MAX_FAILURES]:
        worker.let()
        await worker.ended()
    workers[-1].let()
    poison = await asking
    await asyncio.gather(*others)

    assert (poison.status, poison.error and poison.error["code"]) == (502, "max_attempts")
    assert [line for line in ledger.lines if not line.is_right] == [poison]
    own = {line.request_id.encode() for line in ledger.lines if line is not poison}
    hashes = [fields for key, fields in (await request_hashes(stage.pipeline)).items() if key.split(b":")[-2] in own]
    assert max(int(fields[b"failures"]) for fields in hashes) == 1, "they were together once, and never again"


async def _queued(stage: Stage, count: int) -> None:
    async def missing() -> str:
        queued = await stage.pipeline.redis.zcard(stage.pipeline.key("ready"))
        return "" if queued == count else f"{queued} are queued"

    await eventually(missing, limit_s=40, what=f"{count} queued jobs")
