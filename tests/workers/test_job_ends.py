"""What becomes of a job's entry and of its promised blocks, also while the queue can't be reached."""

from __future__ import annotations

import asyncio

import pytest

from broker.messages import Accepted, Failed, Gone, KvReady, Notice, Reserve
from prefill_worker.ends import JobEnds
from tests.broker.stores import LIMIT_S, job
from tests.workers.live_engine import LiveEngine
from tests.workers.prefill_world import LEASE_S, World, accepted, busy, gone, prefill_world


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_request_that_is_gone_takes_no_room_any_more(mode: str) -> None:
    async with prefill_world(gone) as world:
        await world.queue.enqueue(job("r", mode=mode, gateway=world.endpoint))

        await world.until(lambda: world.state("r") == "gone" and world.is_back_at_start)


@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_job_that_goes_back_takes_no_room_any_more(mode: str) -> None:
    async with prefill_world(busy) as world:
        await world.queue.enqueue(job("r", mode=mode, gateway=world.endpoint))
        await world.until(lambda: len(world.offers) > 2)

        await world.queue.cancel("r", 1)

        await world.until(lambda: world.is_back_at_start)


def _while_away(world: World, answer: type[Accepted] | type[Gone]) -> None:
    """The queue goes away when the job is offered."""

    def on_offer(offer: KvReady | Reserve) -> Notice:
        world.queue.is_away = True
        return {Accepted: accepted, Gone: gone}[answer](offer)

    world.answer = on_offer


@pytest.mark.parametrize(("answer", "state"), [(Accepted, "decoding"), (Gone, "gone")])
@pytest.mark.parametrize("mode", ["pull", "push"])
async def test_a_settle_that_failed_is_made_up_for_when_the_queue_is_back(
    answer: type[Accepted] | type[Gone], state: str, mode: str
) -> None:
    async with prefill_world() as world:
        _while_away(world, answer)
        await world.queue.enqueue(job("r", mode=mode, gateway=world.endpoint))
        await world.until(lambda: "settle" in world.queue.refused)
        assert world.state("r") == "prefill"

        world.queue.is_away = False

        await world.until(lambda: world.state("r") == state and world.is_back_at_start)
        assert len(world.engine.submitted) == (0 if (mode, answer) == ("push", Gone) else 1), "not computed twice"
        assert len(world.engine.released) == (1 if (mode, answer) == ("pull", Gone) else 0), "its reader keeps its KV"


async def test_a_job_that_went_back_while_the_queue_was_away_counts_no_failure() -> None:
    async with prefill_world(busy) as world:
        await world.queue.enqueue(job("r", gateway=world.endpoint))
        await world.until(lambda: len(world.offers) > 0)
        world.queue.is_away = True
        await world.until(lambda: "give_back" in world.queue.refused)
        world.answer = accepted

        world.queue.is_away = False

        await world.until(lambda: world.state("r") == "decoding")
        assert world.offers[-1].pair.attempt > 1
        assert world.queue.failures_of("r", 1) == 0


async def test_a_settle_is_given_up_when_the_lease_is_lost_meanwhile() -> None:
    async with prefill_world() as world:
        _while_away(world, Accepted)
        await world.queue.enqueue(job("r", gateway=world.endpoint))
        await world.until(lambda: world.queue.is_away)
        await world.queue.cancel("r", 1)

        world.queue.is_away = False

        await world.until(lambda: world.metrics.get_sample_value("pdq_prefill_leases") == 0)
        assert world.state("r") == "cancelled"


async def test_failures_reaped_leases_dead_jobs_and_fenced_calls_are_counted() -> None:
    async with prefill_world(engine=LiveEngine(error="engine_error: out of memory")) as world:
        await world.queue.enqueue(job("r", gateway=world.endpoint))
        await world.until(lambda: len(world.failed) == 1)

        assert (world.failed[0].code, world.failed[0].retryable) == ("max_attempts", False)
        assert world.metrics.get_sample_value("pdq_prefill_failures_total", {"cause": "engine_error"}) == 3
        assert world.metrics.get_sample_value("pdq_prefill_dead_jobs_total", {"reason": "max_attempts"}) == 1
    async with prefill_world(engine=LiveEngine(prefills=False)) as world:
        await world.queue.enqueue(job("r", gateway=world.endpoint))
        await world.until(lambda: len(world.engine.submitted) == 1)
        await world.queue.cancel("r", 1)
        await world.queue.enqueue(job("other", gateway=world.endpoint, deadline_s=60.0))
        await world.queue.take("prefill-that-dies", max_tokens=10**9, max_jobs=1)
        world.queue.ahead_s = LEASE_S
        await world.until(lambda: world.metrics.get_sample_value("pdq_prefill_reaped_total") == 1)

        await world.until(lambda: bool(world.metrics.get_sample_value("pdq_prefill_fenced_total", {"call": "renew"})))
        assert world.metrics.get_sample_value("pdq_prefill_fenced_total", {"call": "renew"}) == 1


async def test_a_drain_while_the_queue_is_away_settles_what_was_accepted_and_puts_nothing_back() -> None:
    async with prefill_world(drain_grace_s=60.0) as world:
        _while_away(world, Accepted)
        await world.queue.enqueue(job("r", gateway=world.endpoint))
        await world.until(lambda: "settle" in world.queue.refused)
        world.drain.request("test")
        world.queue.refused.clear()
        await world.until(lambda: "settle" in world.queue.refused)
        assert not world.running.done(), "it waits for the queue, within its grace"

        world.queue.is_away = False

        async with asyncio.timeout(LIMIT_S):
            while not world.running.done():
                world.engine.say(running=0)  # as an engine that lives: its steps make the worker look
                await asyncio.sleep(0.02)
        await world.running
        assert world.state("r") == "decoding"


async def test_a_pair_that_is_held_already_is_given_back_when_an_older_queue_names_it_again() -> None:
    """Redis was restarted from a snapshot, or a replica took over: the last takes never happened."""
    async with prefill_world(busy) as world:
        await world.queue.enqueue(job("r", gateway=world.endpoint))
        await world.until(lambda: len(world.offers) > 0)

        world.queue.forget_take("r", 1)
        await world.until(lambda: world.state("r") == "prefill")
        world.answer = accepted

        await world.until(lambda: world.state("r") == "decoding" and world.is_back_at_start)
        assert world.queue.failures_of("r", 1) == 0


async def test_dead_jobs_of_a_gateway_that_answers_nothing_hold_up_no_take(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = asyncio.Event()
    async with prefill_world() as world:
        told: list[str] = []

        async def never_answered(ends: JobEnds, gateway: str, message: Failed) -> None:
            told.append(message.request_id)
            await silent.wait()

        monkeypatch.setattr(JobEnds, "notify", never_answered)
        for number in range(3):
            await world.queue.enqueue(job(f"late {number}", deadline_s=0.0))
        await world.queue.enqueue(job("fine", gateway=world.endpoint))

        await world.until(lambda: world.state("fine") == "decoding")
        await world.until(lambda: sorted(told) == ["late 0", "late 1", "late 2"])
        silent.set()
