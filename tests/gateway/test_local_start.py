"""The local flow's offers to decode workers."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections import Counter

from broker.base import WorkerRecord
from broker.errors import PeerUnavailable
from broker.links import NoticeInbox, NoticePeers, NoticeReply, NoticeSettings
from broker.membership import RegistryView
from broker.messages import Accepted, Busy, Notice, Start
from gateway.commands import Enqueue
from gateway.exchange import Bell, Exchange
from gateway.local_start import LocalStart
from gateway.prepare import Prompt
from gateway.session import Session
from pdq.wire.types import SamplingParams, pack_ids
from tests.broker.stores import LIMIT_S, eventually


def exchange() -> Exchange:
    session = Session(request_id="r", max_tokens=1, deadline=math.inf, max_migrations=0)
    prompt = Prompt(token_ids=[1, 2], text=None, sampling=SamplingParams(max_tokens=1))
    return Exchange(session=session, prompt=prompt, prompt_ids=pack_ids([1, 2]), bell=Bell(), is_impatient=False)


def record(worker_id: str, endpoint: str) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id, role="decode", state="ready", endpoint=endpoint, model="m", fingerprint="f", block_size=16
    )


class Impatient(NoticePeers):
    """With one endpoint; with others its patience has no end."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(NoticeSettings(notice_timeout_s=LIMIT_S, notice_tries=1), worker_id="g")
        self._endpoint = endpoint

    async def request(
        self, endpoint: str, notice: Notice, *, timeout_s: float | None = None, tries: int | None = None
    ) -> Notice:
        return await super().request(endpoint, notice, timeout_s=0.2 if endpoint == self._endpoint else None)


class Unheard(NoticePeers):
    """Each answer is lost once `is_asked` is set."""

    def __init__(self, is_asked: asyncio.Event) -> None:
        super().__init__(NoticeSettings(notice_timeout_s=LIMIT_S, notice_tries=1), worker_id="g")
        self._is_asked = is_asked

    async def request(
        self, endpoint: str, notice: Notice, *, timeout_s: float | None = None, tries: int | None = None
    ) -> Notice:
        asking = asyncio.ensure_future(super().request(endpoint, notice))
        await self._is_asked.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        raise PeerUnavailable("no answer")


def started(peers: NoticePeers, view: RegistryView) -> LocalStart:
    return LocalStart(peers, view, gateway_id="g", endpoint="tcp://127.0.0.1:1", silent_s=100.0, rng=random.Random(1))


async def test_a_decode_worker_that_was_silent_is_passed_over_while_another_one_answers():
    inboxes = {name: NoticeInbox(NoticeSettings(), worker_id=name) for name in ("dead", "alive")}
    asked: Counter[str] = Counter()

    def answer(notice: Notice, reply: NoticeReply) -> None:
        assert isinstance(notice, Start)
        asked["alive"] += 1
        reply(Accepted(request_id=notice.request_id, pair=notice.pair))

    def say_nothing(notice: Notice, reply: NoticeReply) -> None:
        asked["dead"] += 1

    await inboxes["alive"].start(answer)
    await inboxes["dead"].start(say_nothing)
    peers = Impatient(inboxes["dead"].endpoint)
    view = RegistryView()
    silent = dataclasses.replace(record("dead", inboxes["dead"].endpoint), free_blocks=200)  # it looks best
    full = dataclasses.replace(record("alive", inboxes["alive"].endpoint), free_blocks=20)
    view.workers = tuple(dataclasses.replace(one, total_blocks=200) for one in (silent, full))
    local = started(peers, view)

    for _ in range(3):
        assert await local.start(exchange(), Enqueue(gen=1, generated_ids=b""))

    async def have_all_come() -> bool:
        return asked.total() >= 4

    await eventually(have_all_come)
    assert asked == {"dead": 1, "alive": 3}
    await peers.close()
    for inbox in inboxes.values():
        await inbox.close()


async def test_a_decode_worker_that_has_go_is_the_only_one_that_is_asked_though_its_answer_was_lost():
    inbox = NoticeInbox(NoticeSettings(), worker_id="d")
    it, asked, is_asked = exchange(), [], asyncio.Event()
    commands = it.session.start()

    def admitted_unheard(notice: Notice, reply: NoticeReply) -> None:
        assert isinstance(notice, Start)
        asked.append(notice)
        assert it.session.on_admit(notice.pair, f"decode-{len(asked)}", inbox.endpoint) == (True, [])
        is_asked.set()

    await inbox.start(admitted_unheard)
    peers = Unheard(is_asked)
    view = RegistryView()
    both = [dataclasses.replace(record(name, inbox.endpoint), free_blocks=9, total_blocks=9) for name in ("d", "e")]
    view.workers = tuple(both)

    assert await started(peers, view).start(it, *commands)

    assert len(asked) == 1
    await peers.close()
    await inbox.close()


async def test_a_decode_worker_may_be_busy_after_the_records_were_read_anew():
    view = RegistryView()
    inbox = NoticeInbox(NoticeSettings(), worker_id="d")
    asked: list[NoticeReply] = []
    first_is_asked = asyncio.Event()

    def busy(notice: Notice, reply: NoticeReply) -> None:
        assert isinstance(notice, Start)
        asked.append(reply)
        first_is_asked.set()
        if len(asked) == 2:
            for answer in asked:
                answer(Busy(request_id=notice.request_id, pair=notice.pair, free_tokens=0))

    await inbox.start(busy)
    peers = NoticePeers(NoticeSettings(notice_timeout_s=LIMIT_S), worker_id="g")
    local = started(peers, view)

    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        view.workers = (record("d", inbox.endpoint),)
        first = group.create_task(local.start(exchange(), Enqueue(gen=1, generated_ids=b"")))
        await first_is_asked.wait()
        view.workers = (record("e", inbox.endpoint),)
        second = group.create_task(local.start(exchange(), Enqueue(gen=1, generated_ids=b"")))

    assert not first.result()
    assert not second.result()
    await peers.close()
    await inbox.close()
