"""F1, F31: prefill workers are killed at each point of a job's life; one of them after success and before the ack."""

from __future__ import annotations

import pytest

from tests.faults.conftest import RECOVERY_S
from tests.faults.positions import take_positions
from tests.faults.stage import Stage
from tests.pipeline.ledger import Ledger

pytestmark = pytest.mark.asyncio(loop_scope="package")
POINTS = {
    "pull": ["computing", "before settle", "half read", "claimed", "queued"],
    "push": ["computing", "before settle", "half written", "claimed", "queued"],
}


async def test_prefill_workers_killed_at_every_point_lose_and_double_nothing(stage: Stage, ledger: Ledger) -> None:
    positions = await take_positions(stage, ledger, POINTS[stage.mode])

    for worker in positions.at.values():
        worker.kill()
    positions.decode.let()
    positions.other.let()

    late = await stage.late(positions.pending, RECOVERY_S)
    assert not late
    ledger.all_right()
