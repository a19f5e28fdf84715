"""A transport that can't be fenced: blocks that a dead peer may still write are never used again, so the worker goes.

Its requests are answered by another worker, and whoever keeps it running starts it anew, with new memory.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import RECOVERY_S
from tests.faults.ports import CANNOT_FENCE
from tests.faults.stage import Stage
from tests.pipeline.ledger import Ledger

pytestmark = pytest.mark.asyncio(loop_scope="package")
QUARANTINE_S = 1.0


async def test_a_decode_worker_that_cannot_make_its_blocks_safe_leaves_and_its_requests_go_on(
    stage: Stage, ledger: Ledger
) -> None:
    stage.allowed_faults = ("kv_fence_failed", "engine_failed", "fault", "can't give KV blocks back safely")
    own, others = {"pull": ([CANNOT_FENCE, "half read"], []), "push": ([CANNOT_FENCE], ["half written"])}[stage.mode]
    decode = await stage.spawn("decode", "--kv-quarantine-s", str(QUARANTINE_S), stops_at=own)
    prefill = await stage.spawn("prefill", stops_at=others)
    await stage.serving(decode, prefill)
    await stage.ready()
    asking = [
        asyncio.create_task(ledger.ask(f"{number} {'abc' * 100}", max_tokens=20, stream=number == 0), name=str(number))
        for number in range(2)
    ]
    holder = decode if stage.mode == "pull" else prefill
    await holder.reached("half read" if stage.mode == "pull" else "half written")

    await prefill.killed()  # an engine that lived a moment longer could still be read in full: then nothing is unsafe
    decode.let()
    successors = [await stage.spawn("prefill"), await stage.spawn("decode")]

    assert await decode.ended() == 1
    await stage.serving(*successors)
    late = await stage.late(asking, RECOVERY_S + QUARANTINE_S + 20.0)
    assert not late
    ledger.all_right()
