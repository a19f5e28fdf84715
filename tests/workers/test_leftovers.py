"""Workers keep nothing of requests that are over: no object, no task, no promised block."""

from __future__ import annotations

from collections import Counter

from broker.messages import Accepted, Cancel, KvReady, Notice, Reserve
from broker.promises import Promise
from decode_worker.requests import DecodeRequest
from engine.base import EngineOutput
from pdq.wire.types import Pair
from prefill_worker.held import HeldJob
from tests.broker.stores import job
from tests.leftovers import held, no_more_than
from tests.workers import decode_world as d
from tests.workers import prefill_world as p


async def one_decode(world: d.World, number: int) -> None:
    """Finishes, fails, or is cancelled before or after its first token."""
    assert isinstance(await world.start(f"r{number}"), Accepted)
    request = world.engine.submitted[-1]
    if number % 4 == 0:
        world.engine.say(EngineOutput(engine_request_id=request.engine_request_id, error="engine_error: no"))
        world.engine.free(request.engine_request_id)
        return
    if number % 4 > 1:
        world.engine.token(request, 7)
    if number % 4 == 3:
        world.engine.token(request, 8, finish="length")
        return
    await world.peers.request(
        world.endpoint, Cancel(request_id=f"r{number}", pair=Pair(gen=1, attempt=0), reason="client_disconnected")
    )


async def test_a_decode_worker_keeps_nothing_of_requests_that_are_over() -> None:
    async with d.decode_world(answer_memory_s=0.1) as world:

        def what_is_held() -> Counter[str]:
            return held(DecodeRequest, Accepted)

        await one_decode(world, 3)
        await world.until(lambda: world.worker.record().free_blocks == 100)
        await world.until(lambda: any(delta.finish for delta in world.deltas))  # every connection is there that stays
        world.admits.clear()
        before = what_is_held()

        for number in range(4, 64):
            await one_decode(world, number)

        await world.until(lambda: world.worker.record().free_blocks == 100)
        await one_decode(world, 100)  # what was answered is forgotten when the next one comes
        world.engine.submitted.clear()
        await no_more_than(before + Counter({"Accepted": 1}), what_is_held)


async def test_a_prefill_worker_keeps_nothing_of_jobs_that_are_over() -> None:
    async with p.prefill_world() as world:

        def what_is_held() -> Counter[str]:
            return held(HeldJob, Promise)

        def answer(offer: KvReady | Reserve) -> Notice:
            return (p.accepted, p.busy, p.gone)[len(world.offers) % 3](offer)

        async def jobs(first: int, count: int) -> None:
            names = [f"r{number}" for number in range(first, first + count)]
            for number, name in enumerate(names):
                await world.queue.enqueue(job(name, mode=("pull", "push")[number % 2], gateway=world.endpoint))
            await world.until(lambda: all(world.state(name) in ("decoding", "gone") for name in names))
            await world.until(lambda: world.is_back_at_start)

        world.answer = answer
        await jobs(0, 6)
        before = what_is_held()

        await jobs(6, 54)

        await no_more_than(before | Counter({"HeldJob": 1, "Promise": 1}), what_is_held)  # the last one's
