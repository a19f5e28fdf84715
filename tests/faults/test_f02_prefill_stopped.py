"""F2: prefill workers sleep past their leases, others finish their jobs, they wake up: nothing they still do counts."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import RECOVERY_S
from tests.faults.invariants import request_hashes
from tests.faults.positions import take_positions
from tests.faults.stage import Stage, Worker
from tests.pipeline import process_logs
from tests.pipeline.harness import eventually
from tests.pipeline.ledger import Ledger

pytestmark = pytest.mark.asyncio(loop_scope="package")
POINTS = {
    "pull": ["computing", "before KvReady", "before settle", "half read", "claimed"],
    "push": ["before Reserve", "computing", "before KvReady", "before settle", "half written", "claimed"],
}
STOPS = {"lease_lost", "request_gone", "stalled_job_given_back"}
"""Which of them comes first depends on what looks first: the renewal, the hand-over, or the watch over the engine."""
TRANSPORT_S = 5.0
"""A read from a process that sleeps takes the transport's whole time-out, which can't be set shorter."""


async def _learned(stage: Stage, worker: Worker) -> None:
    """Waits until it has heard that its job is another's. A pipeline may be quiet before it has gone on at all."""

    async def unheard() -> str:
        events = {str(record["event"]) for _, record in process_logs.records(stage.log_dir, worker.name)}
        return "" if events & STOPS else "it goes on"

    await eventually(unheard, limit_s=40, what=f"end of the job of {worker.name}")


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
    for point in ("claimed", "computing"):
        await _learned(stage, positions.at[point])
    await stage.pipeline.quiet()

    assert await request_hashes(stage.pipeline) == before
    await asyncio.gather(*(ledger.ask(f"{number} afterwards " * 20, stream=number % 2 == 0) for number in range(20)))
    ledger.all_right()
