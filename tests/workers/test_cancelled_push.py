"""A pushed request that ends while its prompt is computed: P hears of it from its decode worker at the latest."""

from __future__ import annotations

import pytest

from broker.messages import Accepted, Cancel, Gone, KvReady, Notice, Reserve
from engine.base import EngineOutput
from pdq.wire.types import KvSource, Pair, SamplingParams, pack_ids
from tests.broker.stores import job
from tests.workers import decode_world as d
from tests.workers import prefill_world as p

PAIR = Pair(gen=1, attempt=1)


def reserve(world: d.World) -> Reserve:
    return Reserve(
        request_id="r",
        pair=PAIR,
        remaining_s=60.0,
        prompt_ids=pack_ids([1, 2, 3]),
        generated_ids=b"",
        sampling=SamplingParams(max_tokens=4),
        source=KvSource(engine_id="p", epoch="e", host="127.0.0.1", port=1, tp_size=1, block_size=16),
        gateway=world.gateway.endpoint,
        gateway_id="gateway-1",
        prefill_worker="prefill-1",
        prefill_endpoint="tcp://127.0.0.1:2",
        queue_wait_s=0.0,
    )


def prefilled(world: d.World) -> KvReady:
    return KvReady(
        request_id="r",
        pair=PAIR,
        remaining_s=60.0,
        prompt_ids=b"",
        generated_ids=b"",
        sampling=SamplingParams(max_tokens=4),
        ticket=None,
        gateway=world.gateway.endpoint,
        gateway_id="gateway-1",
        prefill_worker="prefill-1",
        prefill_endpoint="tcp://127.0.0.1:2",
        queue_wait_s=0.0,
        prefill_s=1.0,
        cached_tokens=0,
    )


@pytest.mark.parametrize("how", ["cancelled", "failed"])
@pytest.mark.parametrize("answer_memory_s", [60.0, 0.0], ids=["remembered", "forgotten"])
async def test_d_says_gone_when_the_prefill_of_what_has_ended_there_is_ready(how: str, answer_memory_s: float) -> None:
    async with d.decode_world(answer_memory_s=answer_memory_s) as world:
        assert isinstance(await world.peers.request(world.endpoint, reserve(world)), Accepted)
        if how == "cancelled":
            cancel = Cancel(request_id="r", pair=PAIR, reason="client_disconnected")
            await world.peers.request(world.endpoint, cancel)
        else:
            world.engine.say(EngineOutput(engine_request_id="r:1:1", error="kv_transfer_failed: no"))
            await world.until(lambda: bool(world.failed))

        answer = await world.peers.request(world.endpoint, prefilled(world))

        assert isinstance(answer, Gone)


async def test_p_releases_a_prefill_that_its_decode_worker_calls_gone() -> None:
    def answer(offer: KvReady | Reserve) -> Notice:
        return p.accepted(offer) if isinstance(offer, Reserve) else p.gone(offer)

    async with p.prefill_world(answer) as world:
        await world.queue.enqueue(job("r", mode="push", gateway=world.endpoint))

        await world.until(lambda: world.state("r") == "gone")
        assert world.engine.released == ["r:1:1"]
