"""F8: an engine that stands still loses its job although its worker's heartbeat lives; a slow one never does."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import RECOVERY_S
from tests.faults.invariants import request_hashes
from tests.faults.stage import Stage, Worker
from tests.pipeline.harness import eventually
from tests.pipeline.ledger import Ledger, Line

pytestmark = pytest.mark.asyncio(loop_scope="package")
LEASE_S, STALL_S = 4.0, 4.0
SHORT = ("--lease-s", str(LEASE_S), "--redis-gap-s", "2", "--prefill-stall-s", str(STALL_S))
NUM_CHUNKS = 12
SLOW = ("--max-num-batched-tokens", "256", "--sim-prefill-ms", "1600")
"""The engine moves on after 0.4 s, but the whole prompt takes nearly five leases, or stall times."""


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
    await stage.taken(slow)
    other.let()

    assert not await stage.late([given_up], STALL_S + RECOVERY_S)
    assert not patient.done()
    await eventually(lambda: _unheard(stage, stuck), limit_s=40, what="heartbeat of the one whose engine stands")
    stuck.let()
    await patient
    ledger.all_right()
    told = {line.request_id: fields for line in ledger.lines for fields in [await _hash_of(stage, line)]}
    assert int(told[(await patient).request_id][b"attempt"]) == 1
    assert int(told[(await given_up).request_id][b"attempt"]) == 2


async def _unheard(stage: Stage, worker: Worker) -> str:
    return "" if worker.worker_id in await stage.pipeline.workers() else "it is not in the registry"


async def _hash_of(stage: Stage, line: Line) -> dict[bytes, bytes]:
    hashes = await request_hashes(stage.pipeline)
    return next(fields for key, fields in hashes.items() if line.request_id.encode() in key)
