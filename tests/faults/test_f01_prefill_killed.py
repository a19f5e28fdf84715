"""F1: a prefill worker is killed at a point of a job's life."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.stage import Stage
from tests.pipeline.ledger import Ledger

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_a_prefill_worker_killed_with_a_job_in_its_hands_loses_nothing(stage: Stage, ledger: Ledger) -> None:
    await stage.start("decode")
    doomed = await stage.start("prefill", stops_at=["claimed"])
    await stage.ready()
    asking = asyncio.create_task(ledger.ask("whoever takes me dies " * 20))
    await doomed.reached("claimed")

    doomed.kill()
    await stage.start("prefill")

    await asking
    ledger.all_right()
