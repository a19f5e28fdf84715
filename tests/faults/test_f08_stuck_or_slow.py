"""F8: an engine that stands still loses its job although its worker's heartbeat lives; a slow one never does."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import RECOVERY_S, STALL_S
from tests.faults.invariants import request_hashes
from tests.faults.stage import Stage
from tests.pipeline.ledger import Ledger, Line

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.push_suffices]
LEASE_S = 1.2
SHORT = ("--lease-s", str(LEASE_S), "--redis-gap-s", "0.8")
NUM_CHUNKS = 12
SLOW = ("--max-num-batched-tokens", "256", "--sim-prefill-ms", "1000")
"""A chunk takes a second, so the whole prompt takes ten leases."""


@pytest.mark.parametrize("pipeline", ["pull"], indirect=True)
async def test_progress_decides_who_keeps_a_job_not_heartbeat_nor_time(stage: Stage, ledger: Ledger) -> None:
    stage.allowed_faults = ("engine_stalled",)
    await stage.spawn("decode")
    stuck = await stage.spawn("prefill", *SHORT, stops_at=["before take", "computing"])
    slow = await stage.spawn("prefill", *SHORT, *SLOW, stops_at=["before take", "claimed"])
    other = await stage.spawn("prefill", *SHORT, stops_at=["before take"])
    await stage.serving(*stage.workers)
    await stage.ready()

    stuck.let("before take")
    given_up = asyncio.create_task(ledger.ask("is given up " * 20), name="stuck")
    await stuck.reached("computing")
    stuck.hold("before take")
    slow.let("before take")
    patient = asyncio.create_task(ledger.ask("abcdefgh" * (256 * NUM_CHUNKS // 8)), name="slow")
    await slow.reached("claimed")
    slow.hold("before take")
    slow.let("claimed")
    other.let()

    assert not await stage.late([given_up], STALL_S + RECOVERY_S)
    assert not patient.done()
    assert stuck.worker_id in await stage.pipeline.workers(), "its heartbeat lives"
    stuck.let()
    await patient
    ledger.all_right()
    told = {line.request_id: fields for line in ledger.lines for fields in [await _hash_of(stage, line)]}
    assert int(told[(await patient).request_id][b"attempt"]) == 1
    assert int(told[(await given_up).request_id][b"attempt"]) == 2


async def _hash_of(stage: Stage, line: Line) -> dict[bytes, bytes]:
    hashes = await request_hashes(stage.pipeline)
    return next(fields for key, fields in hashes.items() if line.request_id.encode() in key)
