"""F9: a prompt that brings its worker down, again and again: it is given up, its client is told, and nobody else is."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.invariants import request_hashes
from tests.faults.stage import Stage
from tests.pipeline.ledger import Ledger

pytestmark = pytest.mark.asyncio(loop_scope="package")
MAX_FAILURES = 3
FLAGS = ("--sim-directives", "--max-failures", str(MAX_FAILURES), "--sim-prefill-ms", "200", "--take-ahead-s", "10")
"""Slow, and eager: who has measured himself takes many jobs at once, and computes them in one step."""


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
        worker.hold("before take")

    others = [asyncio.create_task(ledger.ask(f"{number} is innocent " * 3)) for number in range(12)]
    asking = asyncio.create_task(ledger.ask("!crash on me", stream=True))
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
