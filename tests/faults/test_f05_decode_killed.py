"""F5: decode workers are killed in mid-stream, before they have the KV, and in the transfer."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.conftest import RECOVERY_S
from tests.faults.stage import Stage, Worker
from tests.pipeline.ledger import Ledger, Line

pytestmark = pytest.mark.asyncio(loop_scope="package")
PROMPT = "0123456789" * 60
ROOM_FOR_ONE = ("--num-blocks", "80")
SLOW = ("--sim-decode-ms", "90")
"""600 tokens take 54 s: longer than what the test does before the kill, the start of a process among it."""


async def test_decode_workers_killed_at_every_point_break_no_stream(stage: Stage, ledger: Ledger) -> None:
    prefill = await stage.spawn("prefill", stops_at=["half written"])
    doomed = [
        await stage.spawn("decode", *ROOM_FOR_ONE, *SLOW, stops_at=["before Admit", "half read"]) for _ in range(3)
    ]
    await stage.serving(*stage.workers)
    await stage.ready()
    for worker in stage.workers:
        worker.let("half read", "half written")
    asking: list[asyncio.Task[Line]] = []

    async def offered(name: str) -> Worker:
        """The decode worker that is asked to take it, and stands before it asks the gateway."""
        asking.append(asyncio.create_task(ledger.ask(f"{name} {PROMPT}", max_tokens=600, stream=True), name=name))
        worker = await stage.any_reached("before Admit", doomed)
        doomed.remove(worker)
        return worker

    streaming = await offered("streams")
    streaming.let("before Admit")
    await stage.streaming(ledger)
    not_admitted = await offered("is not admitted")
    (last,) = doomed
    in_transfer, point = {"pull": (last, "half read"), "push": (prefill, "half written")}[stage.mode]
    in_transfer.hold(point)
    receiving = await offered("is in transfer")
    receiving.let("before Admit")
    await in_transfer.reached(point)
    await stage.start("decode")

    assert not any(task.done() for task in asking)
    for worker in (streaming, not_admitted, receiving):
        worker.kill()
    prefill.let()

    late = await stage.late(asking, RECOVERY_S)
    assert not late
    ledger.all_right()
