"""A request that a live decode worker does not know any more goes on elsewhere; no other is touched."""

from __future__ import annotations

import asyncio

from broker.messages import Admit, Deltas
from gateway.exchange import Bell, Exchange
from gateway.forgotten import take_list
from gateway.prepare import Prompt
from gateway.session import Session
from pdq.wire.types import Pair, SamplingParams
from tests.gateway.conftest import World, eventually
from tests.gateway.echo_pipeline import Script, echo_pipeline

PAIR = Pair(gen=1, attempt=1)


def exchange_of(request_id: str = "r", *, worker: str = "d1", frame: int = 5) -> Exchange:
    """Admitted by `worker` with frame number `frame` as its next one."""
    session = Session(request_id=request_id, max_tokens=10, deadline=100.0, max_migrations=3)
    session.start()
    session.on_admit(PAIR, worker, "tcp://127.0.0.1:1")
    admit = Admit(
        request_id=request_id,
        pair=PAIR,
        worker=worker,
        endpoint="tcp://127.0.0.1:1",
        prefill_worker="p",
        queue_wait_s=0.0,
        prefill_s=0.0,
        cached_tokens=0,
        frame=frame,
    )
    prompt = Prompt(token_ids=[1], text=None, sampling=SamplingParams(max_tokens=10))
    return Exchange(session=session, prompt=prompt, prompt_ids=b"", bell=Bell(), is_impatient=False, admit=admit)


def listing(frame: int, *ids: str, worker: str = "d1") -> Deltas:
    return Deltas(worker=worker, frame=frame, step=1, items=(), owes=ids)


def test_missing_once_may_be_a_failure_on_its_way_missing_twice_is_forgotten() -> None:
    here, gone = exchange_of("here"), exchange_of("gone")

    assert take_list([here, gone], listing(5, "here")) == []
    assert take_list([here, gone], listing(6, "here")) == [(gone, PAIR)]


def test_a_list_in_between_that_names_it_starts_over() -> None:
    exchange = exchange_of()
    take_list([exchange], listing(5))
    take_list([exchange], listing(6, "r"))

    assert take_list([exchange], listing(7)) == []


def test_lists_from_before_its_admit_and_of_other_workers_say_nothing() -> None:
    exchange = exchange_of(frame=5)

    for frame in (3, 4):
        assert take_list([exchange], listing(frame)) == []
        assert take_list([exchange], listing(frame + 10, worker="d2")) == []
    assert take_list([exchange], listing(5)) == []


def test_a_worker_that_does_not_say_where_its_lists_begin_is_believed() -> None:
    exchange = exchange_of(frame=0)

    assert [take_list([exchange], listing(frame)) for frame in (5, 6, 7)] == [[], [], []]


async def test_a_stream_that_its_decode_worker_forgot_goes_on_at_another_from_what_was_delivered(here: World) -> None:
    here.pipeline.script = lambda lease: Script(forgets_after=3 if lease.pair.gen == 1 else None)
    request = asyncio.create_task(
        here.http.post("/v1/completions", json={"model": "sim", "prompt": "hello", "max_tokens": 20})
    )
    await here.until("pdq_generated_tokens_total", 3)

    async with echo_pipeline(here.queue, here.registry, worker_id="decode-second") as second:
        answer = await request

    assert answer.json()["choices"][0]["text"] == "hello" * 4
    assert here.metric("pdq_migrations_total", reason="request_forgotten", resume="exact") == 1
    taken = [*iter_queue(here.pipeline.taken), *iter_queue(second.taken)]
    assert [lease.pair.gen for lease in taken] == [1, 2]


async def test_requests_that_are_open_are_left_alone_for_many_lists(here: World) -> None:
    gate = asyncio.Semaphore(0)
    here.pipeline.script = lambda lease: Script(gate=gate)
    request = asyncio.create_task(
        here.http.post("/v1/completions", json={"model": "sim", "prompt": "hello", "max_tokens": 2})
    )
    lease = await here.pipeline.taken.get()

    def num_frames() -> int:
        return here.pipeline.deltas.next_frame(lease.job.gateway)

    async def is_open() -> bool:
        return bool(here.pipeline.answers)

    await eventually(is_open)
    before = num_frames()

    async def several_lists_came() -> bool:  # each waits for the acknowledgement of the one before
        return num_frames() >= before + 6

    await eventually(several_lists_came)
    gate.release()
    gate.release()

    assert (await request).json()["choices"][0]["text"] == "he"
    assert here.pipeline.taken.empty()


def iter_queue(queue: asyncio.Queue) -> list:
    return [queue.get_nowait() for _ in range(queue.qsize())]
