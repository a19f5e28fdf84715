"""F2: prefill workers sleep past their leases, others finish their jobs, they wake up: nothing they still do counts."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import RECOVERY_S
from tests.faults.invariants import request_hashes
from tests.faults.positions import take_positions
from tests.faults.stage import Stage, Worker
from tests.pipeline import process_logs
from tests.pipeline.ledger import Ledger

pytestmark = pytest.mark.asyncio(loop_scope="package")
POINTS = {
    "pull": ["claimed", "computing", "before KvReady", "before settle", "half read"],
    "push": ["claimed", "before Reserve", "computing", "before KvReady", "before settle", "half written"],
}
STOPS = {"lease_lost", "request_gone", "stalled_job_given_back"}
"""Which of them comes first depends on what looks first: the renewal, the hand-over, or the watch over the engine."""
TRANSPORT_S = 5.0
"""A read from a process that sleeps takes the transport's whole time-out, which can't be set shorter."""


def _learned(stage: Stage, worker: Worker) -> set[str]:
    return {str(record["event"]) for _, record in process_logs.records(stage.log_dir, worker.name)}


async def test_prefill_workers_that_wake_up_after_their_leases_do_no_harm(stage: Stage, ledger: Ledger) -> None:
    stage.allowed_faults = ("engine_stalled",)  # so it looks to those that wake up
    positions = await take_positions(stage, ledger, POINTS[stage.mode])

    for worker in positions.at.values():
        worker.suspend()
    positions.decode.let()
    positions.other.let()
    late = await stage.late(positions.pending, RECOVERY_S + TRANSPORT_S)
    assert not late
    await stage.nothing_pending()
    before = await request_hashes(stage.pipeline)

    for worker in positions.at.values():
        worker.resume()
        worker.let()
    await stage.pipeline.quiet()

    assert await request_hashes(stage.pipeline) == before
    for point in ("claimed", "computing"):
        assert _learned(stage, positions.at[point]) & STOPS, f"{point}: it went on"
    await asyncio.gather(*(ledger.ask(f"{number} afterwards " * 20, stream=number % 2 == 0) for number in range(20)))
    ledger.all_right()
