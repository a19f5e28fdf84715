"""F3: all prefill workers are killed, and others with new names come when the old ones are forgotten."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import RECOVERY_S
from tests.faults.stage import Stage
from tests.pipeline.harness import eventually
from tests.pipeline.ledger import Ledger

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("pipeline", ["push"], indirect=True)
async def test_queued_and_claimed_requests_wait_for_new_prefill_workers(stage: Stage, ledger: Ledger) -> None:
    await stage.spawn("decode")
    old = [await stage.spawn("prefill", stops_at=["claimed"]) for _ in range(2)]
    await stage.serving(*stage.workers)
    await stage.ready()
    asking = [asyncio.create_task(ledger.ask(f"{number} waits " * 30), name=str(number)) for number in range(8)]
    for worker in old:
        await worker.reached("claimed")

    names = {worker.worker_id for worker in old}
    for worker in old:
        worker.kill()

    async def remembered() -> str:
        return str(names & set(await stage.pipeline.workers()) or "")

    await eventually(remembered, limit_s=40, what="registry without the dead")
    new = await stage.start("prefill")

    assert new.worker_id not in names
    late = await stage.late(asking, RECOVERY_S)
    assert not late
    ledger.all_right()
