"""A Cancel that is here before the answer to the take: what was taken is not begun."""

from __future__ import annotations

import asyncio
from typing import Any

from broker.messages import Cancel
from pdq.wire.types import Pair
from prefill_worker.cancelled import CancelMemory
from tests.broker.stores import job
from tests.workers.prefill_world import prefill_world


async def test_a_job_that_is_cancelled_before_its_take_is_answered_is_not_computed() -> None:
    async with prefill_world() as world:
        take, may_answer, is_taken = world.queue.take, asyncio.Event(), asyncio.Event()

        async def slow_take(owner: str, **limits: Any) -> Any:
            taken = await take(owner, **limits)
            if taken.leases:
                is_taken.set()
                await may_answer.wait()
            return taken

        world.queue.take = slow_take  # type: ignore[method-assign]
        await world.queue.enqueue(job("r1", gateway=world.endpoint))
        await is_taken.wait()
        assert await world.queue.cancel("r1", 1) == "prefill-1"
        world.worker.on_notice(
            Cancel(request_id="r1", pair=Pair(gen=1, attempt=2**31 - 1), reason="cancelled"), lambda answer: True
        )
        may_answer.set()
        await world.queue.enqueue(job("r2", gateway=world.endpoint))
        await world.until(lambda: world.state("r2") == "decoding")

        assert [request.request_id for request in world.engine.submitted] == ["r2"]
        await world.until(lambda: world.is_back_at_start)


def test_a_higher_pair_than_the_cancelled_one_is_wanted() -> None:
    memory = CancelMemory()
    memory.remember("r", Pair(gen=1, attempt=2), 0.0)
    memory.remember("r", Pair(gen=1, attempt=1), 1.0)

    assert memory.covers("r", Pair(gen=1, attempt=2), 2.0)
    assert not memory.covers("r", Pair(gen=1, attempt=3), 2.0)
    assert not memory.covers("r", Pair(gen=2, attempt=1), 2.0)
    assert not memory.covers("other", Pair(gen=1, attempt=1), 2.0)


def test_a_cancel_is_forgotten_after_a_while() -> None:
    memory = CancelMemory()
    memory.remember("r", Pair(gen=1, attempt=1), 0.0)
    memory.remember("later", Pair(gen=1, attempt=1), 30.0)

    assert not memory.covers("r", Pair(gen=1, attempt=1), 20.0)
    assert len(memory) == 1
