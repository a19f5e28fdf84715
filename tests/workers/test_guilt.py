"""An engine that dies takes with it what it computed; only that may be the cause."""

from __future__ import annotations

import pytest

from tests.broker.stores import job
from tests.workers.live_engine import LiveEngine
from tests.workers.prefill_world import busy, prefill_world


@pytest.mark.parametrize(("prefills", "failures"), [(False, 1), (True, 0)], ids=["computing", "waiting_for_a_place"])
async def test_the_death_of_the_engine_counts_against_what_was_being_computed(prefills: bool, failures: int) -> None:
    async with prefill_world(busy, engine=LiveEngine(prefills=prefills), park_s=60.0) as world:
        await world.queue.enqueue(job("r"))
        await world.until(lambda: bool(world.offers) if prefills else bool(world.engine.submitted))

        world.engine.die("killed by signal 9")

        with pytest.raises(ExceptionGroup):
            await world.running
        assert world.state("r") == "queued"
        assert world.queue.failures_of("r", 1) == failures
