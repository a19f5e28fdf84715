"""What the gateway does when the queue takes a job and its word about it is late, or it says nothing for long."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from broker.base import PrefillJob, WorkerRecord
from broker.delivery import QueueSettings
from broker.errors import QueueUnavailable
from broker.links import NoticeInbox, NoticePeers, NoticeReply, NoticeSettings
from broker.membership import RegistryView
from broker.memory import MemoryQueue
from broker.messages import Accepted, Notice, Start
from gateway.commands import Command, Enqueue, Fail, QueueCancel
from gateway.exchange import Bell, Exchange
from gateway.local_start import LocalStart
from gateway.prepare import Prompt
from gateway.queue_cancels import QueueCancels
from gateway.queue_side import QueueSide
from gateway.route import Way
from gateway.session import Session, State
from pdq.runtime.background import Background
from pdq.wire.types import Pair, SamplingParams, pack_ids

LIMIT_S = 30.0


class Troubled(MemoryQueue):
    """`hang` comes before a job is queued, `trouble` after it."""

    def __init__(self) -> None:
        super().__init__(QueueSettings())
        self.hang: Callable[[PrefillJob], Awaitable[None]] | None = None
        self.trouble: Callable[[PrefillJob], object] = lambda job: None

    async def enqueue(self, job: PrefillJob) -> str | None:
        if self.hang is not None:
            await self.hang(job)
        entry_id = await super().enqueue(job)
        self.trouble(job)
        return entry_id


def exchange(request_id: str, *, num_tokens: int = 8, max_migrations: int = 3) -> Exchange:
    session = Session(request_id=request_id, max_tokens=4, deadline=math.inf, max_migrations=max_migrations)
    ids = list(range(num_tokens))
    prompt = Prompt(token_ids=ids, text=None, sampling=SamplingParams(max_tokens=4))
    return Exchange(session=session, prompt=prompt, prompt_ids=pack_ids(ids), bell=Bell(), is_impatient=False)


@dataclass(slots=True, kw_only=True)
class Desk:
    """A queue side with what it has done."""

    side: QueueSide
    queue: Troubled
    background: Background
    view: RegistryView
    performed: list[Command] = field(default_factory=list)
    told_owners: list[str] = field(default_factory=list)

    def perform(self, exchange: Exchange, commands: list[Command], reason: str = "") -> None:
        self.performed += commands
        for command in commands:
            match command:
                case Enqueue():
                    self.side.enqueue(exchange, command)
                case QueueCancel(gen=gen):
                    self.side.cancel(exchange.request_id, gen)

    async def settled(self) -> None:
        """Also what the work in the background has spawned."""
        for _ in range(2):
            await self.background.settled(LIMIT_S)


@asynccontextmanager
async def desk(*, local_max_tokens: int = 0) -> AsyncIterator[Desk]:
    queue, background, view = Troubled(), Background(), RegistryView()
    peers = NoticePeers(NoticeSettings(notice_timeout_s=LIMIT_S), worker_id="g")
    it: Desk
    side = QueueSide(
        queue,
        background,
        gateway_id="g",
        endpoint="tcp://127.0.0.1:1",
        mode=Way.PUSH,
        local_max_tokens=local_max_tokens,
        local=LocalStart(peers, view, gateway_id="g", endpoint="tcp://127.0.0.1:1", silent_s=1.0, rng=random.Random(1)),
        estimate_ms=lambda num_tokens: 0.0,
        on_route=lambda route: None,
        timeout_s=LIMIT_S,
        perform=lambda exchange, commands, reason="": it.perform(exchange, commands, reason),
        cancels=QueueCancels(
            queue,
            background,
            timeout_s=LIMIT_S,
            give_up_s=LIMIT_S,
            on_owner=lambda owner, request_id, gen: it.told_owners.append(owner),
        ),
    )
    it = Desk(side=side, queue=queue, background=background, view=view)
    try:
        yield it
    finally:
        await background.close()
        await peers.close()


def again(here: Desk, exchange: Exchange) -> None:
    """As after a failure before the first token."""
    exchange.session.start()
    failed = exchange.session.on_failed(Pair(gen=1, attempt=1), "engine_error", "", retryable=True)
    here.perform(exchange, [command for command in failed if isinstance(command, Enqueue)])


@asynccontextmanager
async def decode_worker() -> AsyncIterator[tuple[WorkerRecord, asyncio.Queue[str]]]:
    """Takes every request; the queue has the ids."""
    started = asyncio.Queue[str]()

    def accept(notice: Notice, reply: NoticeReply) -> None:
        assert isinstance(notice, Start)
        started.put_nowait(notice.request_id)
        reply(Accepted(request_id=notice.request_id, pair=notice.pair))

    inbox = NoticeInbox(NoticeSettings(), worker_id="d")
    await inbox.start(accept)
    yield (
        WorkerRecord(
            worker_id="d",
            role="decode",
            state="ready",
            endpoint=inbox.endpoint,
            model="m",
            fingerprint="f",
            block_size=16,
        ),
        started,
    )
    await inbox.close()


@pytest.mark.parametrize("max_migrations", [0, 3])
async def test_an_enqueue_whose_answer_is_lost_does_not_cancel_a_job_that_a_decode_worker_has(max_migrations: int):
    async with desk() as here:
        late = exchange("r", max_migrations=max_migrations)

        def taken_and_admitted(job: PrefillJob) -> None:
            is_go, _ = late.session.on_admit(Pair(gen=1, attempt=1), "decode-1", "tcp://127.0.0.1:2")
            assert is_go
            raise QueueUnavailable("the answer was cut off")

        here.queue.trouble = taken_and_admitted
        here.perform(late, late.session.start())
        await here.settled()

        assert here.queue.state_of("r", 1) == "queued"
        assert here.told_owners == []
        assert late.session.state is State.ADMITTED
        assert here.performed == [Enqueue(gen=1, generated_ids=b"")]


async def test_an_enqueue_that_failed_before_anybody_had_the_job_leaves_none():
    async with desk() as here:
        refused = exchange("r")

        def cut_off(job: PrefillJob) -> None:
            raise QueueUnavailable("the answer was cut off")

        here.queue.trouble = cut_off
        here.perform(refused, refused.session.start())
        await here.settled()

        assert here.queue.state_of("r", 1) == "cancelled"
        assert [type(command) for command in here.performed] == [Enqueue, Fail]


async def test_requests_that_wait_for_a_queue_in_trouble_hold_back_none_that_needs_no_queue():
    """Seventeen is one more than may talk to the queue at once."""
    async with desk(local_max_tokens=8) as here, decode_worker() as (record, started):
        here.view.workers = (record,)
        asked = Counter[str]()
        are_refused = asyncio.Event()

        def refuse(job: PrefillJob) -> None:
            asked[job.request_id] += 1
            if len(asked) == 17:
                are_refused.set()
            raise QueueUnavailable("connection refused")

        here.queue.trouble = refuse
        for number in range(17):
            again(here, exchange(f"long-{number}", num_tokens=8))
        again(here, exchange("short", num_tokens=4))

        async with asyncio.timeout(LIMIT_S):
            assert await started.get() == "short"
            await are_refused.wait()  # the seventeenth, too, gets its turn while the others sleep


async def test_no_more_than_sixteen_requests_talk_to_the_queue_at_once_when_all_want_to_go_back():
    async with desk() as here:
        asked = asyncio.Queue[str]()
        may_answer = asyncio.Event()

        async def hang(job: PrefillJob) -> None:
            asked.put_nowait(job.request_id)
            await may_answer.wait()

        here.queue.hang = hang
        for number in range(20):
            again(here, exchange(f"r{number}"))
        async with asyncio.timeout(LIMIT_S):
            for _ in range(16):
                await asked.get()
        for _ in range(20):
            await asyncio.sleep(0)
        num_asked_too_many = asked.qsize()
        may_answer.set()
        await here.settled()

        assert num_asked_too_many == 0
        assert (await here.queue.depth()).queued == 20


async def test_what_was_admitted_while_the_answer_was_lost_is_not_put_in_again():
    async with desk() as here:
        late = exchange("r")
        asked: list[int] = []

        def taken_and_admitted(job: PrefillJob) -> None:
            asked.append(job.gen)
            late.session.on_admit(Pair(gen=2, attempt=1), "decode-1", "tcp://127.0.0.1:2")
            raise QueueUnavailable("the answer was cut off")

        here.queue.trouble = taken_and_admitted
        again(here, late)
        await here.settled()

        assert asked == [2]


async def test_a_request_that_moves_on_tells_the_queue_how_long_it_has_waited():
    async with desk() as here:
        moving = exchange("r")
        moving.received_at = asyncio.get_running_loop().time() - 100
        here.perform(moving, moving.session.start())
        await here.settled()
        failed = moving.session.on_failed(Pair(gen=1, attempt=1), "engine_error", "", retryable=True)
        here.perform(moving, [command for command in failed if isinstance(command, Enqueue)])
        await here.settled()

        taken = await here.queue.take("p1", max_tokens=10**9, max_jobs=2)

        second, first = (lease.job for lease in taken.leases)
        assert (first.gen, first.waited_s) == (1, 0.0)
        assert second.gen == 2, "it goes first"
        assert 100 <= second.waited_s <= 100 + LIMIT_S
