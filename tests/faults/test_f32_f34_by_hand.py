"""The queue hears from others than gateways: F32 of envelopes that are no jobs, F34 cancels before and after a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from broker.base import PrefillJob
from broker.delivery import QueueSettings
from broker.links import NoticePeers, NoticeSettings
from broker.messages import Cancel, Cancelled
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_dead import DeadLetters
from broker.redis_queue import JOBS, RedisPrefillQueue
from pdq.wire.types import Pair, SamplingParams, pack_ids
from tests.faults.crew import Crew, hired, judged
from tests.faults.invariants import Books
from tests.pipeline.harness import Pipeline, eventually
from tests.pipeline.ledger import Ledger
from tests.pipeline.test_worker_metrics import scrape

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.parametrize("pipeline", ["pull"], indirect=True, scope="package"),
]

SHORT = ("--lease-s", "6")
"""What is in the stream alone is found when a lease is over."""
FIVE_MB = b"\x07" * 5_000_000


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def crew(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Crew]:
    async with hired(pipeline, tmp_path_factory.mktemp("crew"), prefill_flags=SHORT, decode_flags=()) as hired_crew:
        hired_crew.stage.allowed_faults = ("payload_unreadable",)
        yield hired_crew


@pytest_asyncio.fixture(autouse=True, loop_scope="package")
async def books(crew: Crew) -> AsyncIterator[Books]:
    async with judged(crew) as own:
        yield own


@asynccontextmanager
async def own_calls(pipeline: Pipeline) -> AsyncIterator[RedisCalls]:
    calls = RedisCalls(RedisSettings(redis=pipeline.deployment.redis_url))
    try:
        yield calls
    finally:
        await calls.close()


def own_job(request_id: str, gateway: str, gateway_id: str) -> PrefillJob:
    return PrefillJob(
        request_id=request_id,
        gen=1,
        prompt_ids=pack_ids(range(20)),
        generated_ids=b"",
        sampling=SamplingParams(max_tokens=3, temperature=0.0),
        deadline_s=60.0,
        gateway=gateway,
        gateway_id=gateway_id,
        mode="pull",
    )


async def gateway_of(pipeline: Pipeline) -> tuple[str, str]:
    """(endpoint, id)"""
    ((name, record),) = [(n, r) for n, r in (await pipeline.workers()).items() if r["role"] == "gateway"]
    return record["endpoint"], name


async def test_envelopes_that_are_no_jobs_become_dead_letters_and_the_workers_live_on(
    crew: Crew, pipeline: Pipeline, ledger: Ledger, books: Books
) -> None:
    gateway, gateway_id = await gateway_of(pipeline)
    payloads = {
        "no-msgpack": b"\xc1 not a job",
        "five-megabytes": FIVE_MB,
        "other-version": JOBS.encode(own_job("other-version", gateway, gateway_id)).replace(b"\x01", b"\x63", 1),
        "other-request": JOBS.encode(own_job("r", gateway, gateway_id)),
    }
    entries: list[dict[str, str | bytes]] = [{"hello": "world"}, {"id": "five", "payload": FIVE_MB}]
    books.num_foreign = 2 * len(entries)
    async with own_calls(pipeline) as calls:
        queue = RedisPrefillQueue(calls, pipeline.model, QueueSettings())
        letters = DeadLetters(calls, pipeline.model)
        await crew.stage.no_more_takes(crew.prefill)
        asking = [asyncio.create_task(ledger.ask(f"{number} in between", max_tokens=8)) for number in range(4)]
        for name, payload in payloads.items():
            await queue.enqueue(own_job(name, gateway, gateway_id))
            await pipeline.redis.set(queue.keys.job(name, 1), payload)
        for entry in entries:
            added = await pipeline.redis.xadd(queue.keys.stream, entry)
            await pipeline.redis.zadd(queue.keys.ready, {added: 0})
            await pipeline.redis.xadd(queue.keys.stream, entry)  # in the stream alone, too
        crew.prefill.let()
        await asyncio.gather(*asking)

        async def unburied() -> str:
            found = await letters.newest(100)
            return "" if len(found) == len(payloads) + 2 * len(entries) else f"{len(found)} dead letters"

        await eventually(unburied, limit_s=60, what="dead letters")
        found = await letters.newest(100)
        await queue.close()

        ledger.all_right()
        assert {letter.fields["reason"] for letter in found} == {"payload_invalid"}
        assert {letter.request_id for letter in found} >= set(payloads)
        assert all(letter.fields["error"].startswith(("payload: ", "stream entry ")) for letter in found)
        for letter in found:
            assert await letters.drop(letter)
    await ledger.ask("all live on", max_tokens=6)
    ledger.all_right()
    assert crew.prefill.process.returncode is None


async def test_a_cancel_before_its_job_and_one_after_its_answer_change_nothing_else(
    crew: Crew, pipeline: Pipeline, ledger: Ledger
) -> None:
    gateway, gateway_id = await gateway_of(pipeline)
    num_computed = await crew.prefilled()
    async with own_calls(pipeline) as calls:
        queue = RedisPrefillQueue(calls, pipeline.model, QueueSettings())

        assert await queue.cancel("early", 1) is None
        assert await queue.enqueue(own_job("early", gateway, gateway_id)) is None
        await ledger.ask("not early", max_tokens=4)
        await crew.freed(limit_s=40)  # the client has its answer before the queue hears of the hand-over
        (request_id,) = [
            key.decode().split(":")[-2]
            async for key in pipeline.redis.scan_iter(pipeline.key("req:*"))
            if b":early:" not in key
        ]
        assert await queue.cancel(request_id, 1) is None
        assert await pipeline.redis.hget(queue.keys.req(request_id, 1), "state") == b"decoding"
        await queue.close()
    await cancelled_by_hand(pipeline, request_id)
    await ledger.ask("afterwards", max_tokens=4)

    ledger.all_right()
    assert await crew.prefilled() == num_computed + 2, "the early one was never computed"
    assert (await scrape(crew.decode_port))["pdq_decode_requests_total{outcome=finished}"] == await crew.prefilled()


async def cancelled_by_hand(pipeline: Pipeline, request_id: str) -> None:
    """As a gateway whose Cancel was long on its way."""
    peers = NoticePeers(NoticeSettings(notice_tries=200), worker_id="late-gateway")
    try:
        for record in (await pipeline.workers()).values():
            if record["role"] != "gateway":
                cancel = Cancel(request_id=request_id, pair=Pair(gen=1, attempt=1), reason="late")
                assert isinstance(await peers.request(record["endpoint"], cancel), Cancelled)
    finally:
        await peers.close()


async def test_clients_that_leave_before_the_queue_has_heard_of_them_are_never_computed(
    crew: Crew, pipeline: Pipeline, ledger: Ledger
) -> None:
    num_computed = await crew.prefilled()
    await crew.stage.no_more_takes(crew.prefill)
    await pipeline.redis.execute_command("CLIENT", "PAUSE", "3000", "WRITE")
    await asyncio.gather(
        *(ledger.ask(f"{number} leaves", stream=number % 2 == 0, leave_after_s=1.0) for number in range(6))
    )
    await pipeline.redis.execute_command("CLIENT", "UNPAUSE")

    async def uncancelled() -> str:
        states = await crew.states()
        return "" if states == ["cancelled"] * 6 else str(states)

    await eventually(uncancelled, limit_s=40, what="cancelled requests")
    await crew.freed(limit_s=40)
    crew.prefill.let("before take")
    await ledger.ask("stays", max_tokens=4)
    await crew.freed(limit_s=40)

    ledger.all_right()
    assert [line.is_left for line in ledger.lines] == [True] * 6 + [False]
    assert await crew.states() == ["cancelled"] * 6 + ["decoding"]
    assert await crew.prefilled() == num_computed + 1
