"""Whom a finished prefill is offered to, and when it is offered again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from broker.base import JobLease, WorkerRecord
from broker.links import NoticeInbox, NoticePeers, NoticeReply, NoticeSettings
from broker.membership import RegistryView
from broker.messages import Accepted, Busy, KvReady, Notice
from pdq.wire.types import KvTicket, Pair, SamplingParams, pack_ids
from prefill_worker.handover import Handover, Outcome
from prefill_worker.held import HeldJob, Phase
from prefill_worker.settings import PrefillWorkerSettings
from tests.broker.stores import eventually, job

LIMIT_S = 30.0
NOTICES = NoticeSettings(notice_timeout_s=0.1, notice_tries=4)
"""The patience with a decode worker that says nothing. With others it has no end: they answer, however late."""


class Decoder:
    """A decode worker's inbox. Does with an offer what the test says."""

    def __init__(self, name: str, answer: str) -> None:
        self.name = name
        self.answer = answer
        self.asked: list[str] = []
        """Ids of requests, each once: an offer is repeated."""
        self.offered = asyncio.Event()
        self.waiting: dict[str, tuple[KvReady, NoticeReply]] = {}
        self.inbox = NoticeInbox(NOTICES, worker_id=name)

    def on_notice(self, notice: Notice, reply: NoticeReply) -> None:
        assert isinstance(notice, KvReady)
        self.asked += [] if notice.request_id in self.asked else [notice.request_id]
        self.offered.set()
        if self.answer == "accept":
            reply(Accepted(request_id=notice.request_id, pair=notice.pair, clock_ms=1000))
        elif self.answer == "busy":
            reply(Busy(request_id=notice.request_id, pair=notice.pair, free_tokens=0))
        elif self.answer == "wait":
            self.waiting[notice.request_id] = notice, reply

    @property
    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.name,
            role="decode",
            state="ready",
            endpoint=self.inbox.endpoint,
            model="m",
            fingerprint="f",
            total_blocks=100,
            free_blocks=100 if self.answer == "silent" else 50,  # the silent one looks best
            block_size=16,
        )


class Peers(NoticePeers):
    def __init__(self, decoders: Sequence[Decoder]) -> None:
        super().__init__(NOTICES, worker_id="p1")
        self._decoders = {decoder.inbox.endpoint: decoder for decoder in decoders}

    async def request(
        self, endpoint: str, notice: Notice, *, timeout_s: float | None = None, tries: int | None = None
    ) -> Notice:
        is_silent = self._decoders[endpoint].answer == "silent"
        return await super().request(endpoint, notice, tries=None if is_silent else round(LIMIT_S / 0.1))


@asynccontextmanager
async def handover_to(
    *decoders: Decoder, park_s: float = 0.0, view: RegistryView | None = None
) -> AsyncIterator[Handover]:
    peers = Peers(decoders)
    view = view or RegistryView()
    for decoder in decoders:
        await decoder.inbox.start(decoder.on_notice)
    view.workers = tuple(decoder.record for decoder in decoders)
    try:
        yield Handover(
            fingerprint="f",
            peers=peers,
            view=view,
            settings=PrefillWorkerSettings(park_s=park_s, park_retry_s=60.0, silent_s=60.0),
            clock=asyncio.get_running_loop().time,
            rng=random.Random(1),
        )
    finally:
        await peers.close()
        for decoder in decoders:
            await decoder.inbox.close()


def prefill(request_id: str, *, tokens: int = 3) -> tuple[HeldJob, KvReady]:
    pair = Pair(gen=1, attempt=1)
    lease = JobLease(
        job=job(request_id, tokens=tokens),
        entry_id="1-1",
        owner="p1",
        pair=pair,
        remaining_s=60.0,
        queue_wait_s=0.0,
        failures=0,
    )
    ticket = KvTicket(
        transfer_id=request_id,
        pair=pair,
        engine_id="e",
        epoch="x",
        host="127.0.0.1",
        port=1,
        tp_size=1,
        block_size=16,
        num_tokens=tokens,
        block_ids=pack_ids([0]),
    )
    ready = KvReady(
        request_id=request_id,
        pair=pair,
        remaining_s=60.0,
        prompt_ids=lease.job.prompt_ids,
        generated_ids=b"",
        sampling=SamplingParams(max_tokens=1),
        ticket=ticket,
        gateway="tcp://127.0.0.1:1",
        gateway_id="g1",
        prefill_worker="p1",
        prefill_endpoint="tcp://127.0.0.1:1",
        queue_wait_s=0.0,
        prefill_s=0.0,
        cached_tokens=0,
    )
    return HeldJob(lease=lease, taken_at=asyncio.get_running_loop().time()), ready


async def test_a_decode_worker_that_was_silent_is_not_asked_again_while_another_one_answers() -> None:
    silent, alive = Decoder("d1", "silent"), Decoder("d2", "accept")
    async with handover_to(silent, alive) as handover:
        for number in range(5):
            result = await handover.offer(*prefill(f"r{number}"))
            assert (result.outcome, result.decode_worker) == (Outcome.ACCEPTED, "d2")

    assert silent.asked in ([], ["r0"]), "one offer; if it came at all before it was given up"
    assert alive.asked == [f"r{number}" for number in range(5)]


async def test_the_only_decode_worker_is_asked_again_although_it_was_silent() -> None:
    only = Decoder("d1", "silent")
    async with handover_to(only) as handover:
        assert (await handover.offer(*prefill("r1"))).outcome is Outcome.NO_ROOM
        only.answer = "accept"

        assert (await handover.offer(*prefill("r2"))).outcome is Outcome.ACCEPTED


async def test_offers_under_way_count_so_that_a_batch_is_spread() -> None:
    """Prefills of one engine step end together: each choice must see those before it."""
    decoders = Decoder("d1", "accept"), Decoder("d2", "accept")
    async with handover_to(*decoders) as handover:
        results = await asyncio.gather(*(handover.offer(*prefill(f"r{number}")) for number in range(10)))

    assert sorted(result.decode_worker for result in results) == ["d1"] * 5 + ["d2"] * 5


async def test_what_was_accepted_counts_until_the_worker_s_own_record_does() -> None:
    """The view is refreshed in between, with records that were written before."""
    decoders = Decoder("d1", "accept"), Decoder("d2", "accept")
    view = RegistryView()
    chosen = []
    async with handover_to(*decoders, view=view) as handover:
        for number in range(10):
            view.workers = tuple(decoder.record for decoder in decoders)
            chosen.append((await handover.offer(*prefill(f"r{number}", tokens=64))).decode_worker)

    assert sorted(chosen) == ["d1"] * 5 + ["d2"] * 5


async def test_a_promise_that_was_not_taken_is_withdrawn() -> None:
    busy = Decoder("d1", "busy")
    async with handover_to(busy) as handover:
        for number in range(4):
            assert (await handover.offer(*prefill(f"r{number}", tokens=50 * 16))).outcome is Outcome.NO_ROOM
        asked = list(busy.asked)
        busy.answer = "accept"
        result = await handover.offer(*prefill("large", tokens=50 * 16))

    assert asked == [f"r{number}" for number in range(4)]
    assert result.outcome is Outcome.ACCEPTED


async def test_a_worker_that_looks_full_is_asked_all_the_same_for_its_record_may_be_old() -> None:
    decoder = Decoder("d1", "accept")
    async with handover_to(decoder) as handover:
        result = await handover.offer(*prefill("larger than the record's free blocks", tokens=60 * 16))

    assert result.outcome is Outcome.ACCEPTED


async def test_kv_that_was_read_is_not_offered_again() -> None:
    """The decode worker read it, and then got no Go."""
    reader = Decoder("d1", "wait")
    async with handover_to(reader, park_s=60.0) as handover, asyncio.timeout(LIMIT_S):
        held, ready = prefill("r1")
        offer = asyncio.create_task(handover.offer(held, ready))
        await reader.offered.wait()
        held.is_kv_gone = True
        notice, reply = reader.waiting["r1"]
        reply(Busy(request_id=notice.request_id, pair=notice.pair, free_tokens=0))

        assert (await offer).outcome is Outcome.KV_GONE, "it was not offered again"


async def test_a_reader_that_takes_the_request_after_all_has_it() -> None:
    reader = Decoder("d1", "wait")
    async with handover_to(reader) as handover, asyncio.timeout(LIMIT_S):
        held, ready = prefill("r1")
        offer = asyncio.create_task(handover.offer(held, ready))
        await reader.offered.wait()
        held.is_kv_gone = True
        notice, reply = reader.waiting["r1"]
        reply(Accepted(request_id=notice.request_id, pair=notice.pair))

        assert (await offer).outcome is Outcome.ACCEPTED


@pytest.mark.parametrize("num_jobs", [1, 5])
async def test_room_wakes_every_parked_prefill(num_jobs: int) -> None:
    decoder = Decoder("d1", "busy")
    async with handover_to(decoder, park_s=60.0) as handover:
        jobs = [prefill(f"r{number}") for number in range(num_jobs)]
        offers = [asyncio.create_task(handover.offer(held, ready)) for held, ready in jobs]

        async def are_parked() -> bool:
            return all(held.phase is Phase.PARKED for held, _ in jobs)

        await eventually(are_parked)
        decoder.answer = "accept"
        handover.on_room()

        async with asyncio.timeout(LIMIT_S):
            results = await asyncio.gather(*offers)

    assert {result.outcome for result in results} == {Outcome.ACCEPTED}


async def test_a_parked_prefill_is_one_while_it_is_offered_again_until_it_is_accepted() -> None:
    """Or more than `park_limit` would wait: whoever asks at that moment would take another one."""
    decoder = Decoder("d1", "busy")
    async with handover_to(decoder, park_s=60.0) as handover, asyncio.timeout(60):
        held, ready = prefill("r1")
        offer = asyncio.create_task(handover.offer(held, ready))

        async def is_parked() -> bool:
            return held.phase is Phase.PARKED

        await eventually(is_parked)
        decoder.answer = "wait"
        handover.on_room()
        while "r1" not in decoder.waiting:
            decoder.offered.clear()
            await decoder.offered.wait()
        assert held.phase is Phase.PARKED
        notice, reply = decoder.waiting["r1"]
        reply(Accepted(request_id=notice.request_id, pair=notice.pair))
        result = await offer

    assert result.outcome is Outcome.ACCEPTED
    assert held.phase is Phase.OFFERING


async def test_room_that_is_told_while_an_offer_is_under_way_is_not_missed() -> None:
    """Room, then another job's offer, then Busy for the first one: it was busy before there was room."""
    decoder = Decoder("d1", "wait")
    async with handover_to(decoder, park_s=60.0) as handover, asyncio.timeout(LIMIT_S):
        first = asyncio.create_task(handover.offer(*prefill("r1")))
        await decoder.offered.wait()
        handover.on_room()
        second = asyncio.create_task(handover.offer(*prefill("r2")))
        while "r2" not in decoder.waiting:
            decoder.offered.clear()
            await decoder.offered.wait()
        decoder.answer = "accept"
        notice, reply = decoder.waiting["r1"]
        reply(Busy(request_id=notice.request_id, pair=notice.pair, free_tokens=0))

        results = await asyncio.gather(first, second)

    assert {result.outcome for result in results} == {Outcome.ACCEPTED}
