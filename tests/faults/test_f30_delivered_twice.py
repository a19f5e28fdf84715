"""F30: one job is given to two workers at once. One hand-over wins, whichever comes first."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.stage import Stage, Worker
from tests.pipeline import process_logs
from tests.pipeline.harness import eventually
from tests.pipeline.ledger import Ledger

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.push_suffices]
PROMPT = "0123456789" * 60


async def test_of_two_workers_with_one_job_only_one_hands_it_over(stage: Stage, ledger: Ledger) -> None:
    offer = {"pull": "before KvReady", "push": "before Reserve"}[stage.mode]
    first = await stage.spawn("prefill", stops_at=["before take", "claimed", offer, "before settle"])
    second = await stage.spawn("prefill", stops_at=["before take"])
    await stage.spawn("decode", "--sim-decode-ms", "30")
    await stage.serving(*stage.workers)
    await stage.ready()
    first.let("before take", offer)

    running = asyncio.create_task(ledger.ask(f"is running already {PROMPT}", max_tokens=600, stream=True))
    await stage.taken(first)
    await first.reached("before settle")
    await stage.streaming(ledger)
    await _deliver_again(stage)
    second.let("before take")
    await stage.nothing_pending()
    assert not running.done(), "the second worker has come and gone while the first one's request is answered"
    first.let("before settle")
    await running

    await stage.no_more_takes(second)
    first.hold(offer)
    first.hold("claimed")
    first.let("before take")
    late = asyncio.create_task(ledger.ask(f"comes late {PROMPT}", max_tokens=20))
    await stage.taken(first)
    await first.reached(offer)
    await _deliver_again(stage)
    second.let("before take")
    line = await late
    first.let(offer)
    await _learns(stage, first, line.request_id)

    ledger.all_right()
    moved = process_logs.events(stage.pipeline.log_dir, "request_migrated")
    assert not {event["request_id"] for event in moved} & {line.request_id for line in ledger.lines}
    assert process_logs.events(stage.log_dir, "request_gone", second.name)


async def _learns(stage: Stage, worker: Worker, request_id: str) -> None:
    """Waits until it has heard, from whomever, that it came late."""

    async def unheard() -> str:
        ends = [
            *process_logs.events(stage.log_dir, "request_gone", worker.name),
            *process_logs.events(stage.log_dir, "lease_lost", worker.name),
        ]
        return "" if any(end["request_id"] == request_id for end in ends) else "it goes on"

    await eventually(unheard, limit_s=40, what=f"end of the job of {worker.name}")


async def _deliver_again(stage: Stage) -> None:
    """The only leased job may be taken by somebody else, although its lease lives."""
    redis, key = stage.pipeline.redis, stage.pipeline.key
    ((entry, fields),) = await redis.xrange(key("prefill"))
    await redis.zadd(key("ready"), {entry: float(fields[b"due"])})
    await redis.xadd(key("wake"), {"why": "a test"}, maxlen=1)
