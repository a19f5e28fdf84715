"""What a client gets when something goes wrong: a true status, or an error event; never a silent end."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from broker.errors import QueueUnavailable
from gateway.settings import GatewaySettings
from tests.gateway.conftest import LIMIT_S, World, eventually, world
from tests.gateway.echo_pipeline import Script, echo_pipeline

TEXT = {"model": "sim", "prompt": "hello", "max_tokens": 20}


async def stream_lines(here: World, *, status: int | None = 200, **fields) -> list[str]:
    answer = await here.http.post("/v1/completions", json={**TEXT, "stream": True, **fields})
    assert status in (None, answer.status_code)
    return [line for line in answer.text.split("\n\n") if line]


def text_of(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_has_its_status(here, stream):
    here.pipeline.script = lambda lease: Script(fail_after=0, fail_code="kv_transfer_failed")

    answer = await here.http.post("/v1/completions", json={**TEXT, "stream": stream})

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "kv_transfer_failed")
    assert here.metric("pdq_requests_total", endpoint="completions", outcome="error") == 1


async def test_a_later_failure_is_an_error_event_in_one_line_and_done(here):
    gate = asyncio.Semaphore(3)
    here.pipeline.script = lambda lease: Script(fail_after=3, gate=gate)
    request = asyncio.create_task(stream_lines(here))
    await here.until("pdq_generated_tokens_total", 3)

    gate.release()
    lines = await request

    assert text_of(lines) == "hel"
    error = json.loads(lines[-2][6:])["error"]
    assert (error["code"], error["type"]) == ("engine_error", "server_error")
    assert "\n" in error["message"]
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason":"' not in "".join(lines)


async def test_a_retryable_failure_goes_on_where_it_was_and_nobody_can_tell(here):
    gate = asyncio.Semaphore(3)
    first = Script(fail_after=3, is_retryable=True, gate=gate)
    here.pipeline.script = lambda lease: first if lease.pair.gen == 1 else Script()
    request = asyncio.create_task(stream_lines(here))
    await here.until("pdq_generated_tokens_total", 3)  # the failure has a link of its own and may overtake tokens

    gate.release()
    lines = await request

    assert text_of(lines) == "hello" * 4
    assert lines[-1] == "data: [DONE]"
    assert here.metric("pdq_migrations_total", reason="engine_error", resume="exact") == 1


async def test_migrations_end_with_the_failure(here):
    here.pipeline.script = lambda lease: Script(fail_after=0, is_retryable=True)

    answer = await here.http.post("/v1/completions", json=TEXT)

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_error")
    assert here.pipeline.taken.qsize() == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_before_the_first_token_is_a_504(here, stream):
    here.pipeline.script = lambda lease: Script(is_held=True)

    for seconds in ("1", "20"):
        headers = {"X-Request-Timeout-S": seconds}
        answer = await here.http.post("/v1/completions", json={**TEXT, "stream": stream}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        if here.pipeline.taken.qsize():
            break  # else the deadline came before the job was taken
    assert (await here.pipeline.next_cancel()).reason == "cancelled"


async def test_the_deadline_in_the_stream_is_an_error_event_and_stops_the_worker(here):
    here.pipeline.script = lambda lease: Script(stall_after=2)
    for seconds in (0.3, 3.0, 8.0):
        before = here.metric("pdq_deadlines_total", phase="streaming")
        lines = await stream_lines(here, request_timeout_s=seconds, status=None)
        if text_of(lines) == "he":
            break  # else the deadline came before the second token
    assert json.loads(lines[-2][6:])["error"]["code"] == "deadline_exceeded"
    assert (await here.pipeline.next_cancel()).reason == "deadline_exceeded"
    assert here.metric("pdq_deadlines_total", phase="streaming") == before + 1
    assert here.metric("pdq_cancels_total", reason="deadline_exceeded") >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_its_request(here, stream):
    here.pipeline.script = lambda lease: Script(stall_after=2)
    request = asyncio.create_task(here.http.post("/v1/completions", json={**TEXT, "stream": stream}))
    lease = await here.pipeline.taken.get()

    request.cancel()

    cancel = await here.pipeline.next_cancel()
    assert cancel.request_id == lease.job.request_id
    await here.until("pdq_requests_total", 1, endpoint="completions", outcome="cancelled")
    assert here.metric("pdq_requests_in_flight") == 0


async def test_a_client_that_leaves_while_its_prompt_is_queued_leaves_no_job():
    async with world(takes=False) as here:
        request = asyncio.create_task(here.http.post("/v1/completions", json=TEXT))
        assert await here.queue.wait(LIMIT_S)

        request.cancel()

        async def is_empty():
            return (await here.queue.depth()).queued == 0

        await eventually(is_empty)


async def test_headers_wait_for_the_first_event_then_comments_keep_the_stream_open():
    settings = GatewaySettings(http_port=0, sse_first_event_s=0.1, sse_keepalive_s=0.1, tick_s=0.02)
    async with world(settings) as here:
        gate = asyncio.Semaphore(0)
        here.pipeline.script = lambda lease: Script(gate=gate)
        async with here.http.stream("POST", "/v1/completions", json={**TEXT, "stream": True}) as answer:
            lines = answer.aiter_lines()
            comments = [await anext(lines) for _ in range(4)]
            for _ in range(20):
                gate.release()
            rest = [line async for line in lines]

    assert comments == [": keep-alive", ""] * 2
    assert rest[-2] == "data: [DONE]"
    assert answer.status_code == 200


async def test_a_worker_that_is_gone_is_noticed_and_its_requests_go_on():
    settings = GatewaySettings(http_port=0, owner_silence_s=0.2, owner_check_s=0.05)
    async with world(settings) as here:
        here.pipeline.script = lambda lease: Script(stall_after=3)
        request = asyncio.create_task(stream_lines(here))
        await here.pipeline.taken.get()
        await here.until("pdq_generated_tokens_total", 3)

        async with echo_pipeline(here.queue, here.registry, worker_id="decode-second") as second:
            await here.pipeline.stop()
            lines = await request

        assert text_of(lines) == "hello" * 4
        assert second.taken.get_nowait().pair.gen == 2
        assert here.metric("pdq_decode_workers_lost_total", reason="process_gone") == 1


async def test_a_worker_without_a_step_is_given_up():
    settings = GatewaySettings(http_port=0, stall_s=0.3, owner_check_s=0.05, max_migrations=0)
    async with world(settings) as here:
        here.pipeline.script = lambda lease: Script(stall_after=3)

        lines = await stream_lines(here)

    assert json.loads(lines[-2][6:])["error"]["code"] == "decode_worker_lost"


async def test_a_job_that_the_queue_has_lost_is_put_in_again():
    settings = GatewaySettings(http_port=0, lost_check_s=0.05)
    async with world(settings, takes=False) as here:
        request = asyncio.create_task(here.http.post("/v1/completions", json=TEXT))
        assert await here.queue.wait(LIMIT_S)
        here.queue.forget()

        async with echo_pipeline(here.queue, here.registry, worker_id="decode-second") as second:
            answer = await request

    assert answer.json()["choices"][0]["text"] == "hello" * 4
    assert second.taken.get_nowait().pair.gen == 2


async def test_a_dead_letter_whose_notice_was_lost_is_an_answer_all_the_same():
    settings = GatewaySettings(http_port=0, lost_check_s=0.05)
    async with world(settings, takes=False) as here:
        request = asyncio.create_task(here.http.post("/v1/completions", json=TEXT))
        while not here.queue.dead_letters:
            assert await here.queue.wait(LIMIT_S)
            for lease in (await here.queue.take("prefill-1", max_tokens=10**9, max_jobs=1)).leases:
                await here.queue.give_back(lease, failure="engine_error: out of memory")

        answer = await request

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "max_attempts")
    assert "out of memory" in answer.json()["error"]["message"]


@pytest.mark.parametrize("state", ["gone", "decoding"])
async def test_a_job_that_ended_without_an_owner_is_tried_again(state):
    settings = GatewaySettings(http_port=0, lost_check_s=0.05)
    async with world(settings, takes=False) as here:
        request = asyncio.create_task(here.http.post("/v1/completions", json=TEXT))
        assert await here.queue.wait(LIMIT_S)
        (lease,) = (await here.queue.take("prefill-1", max_tokens=10**9, max_jobs=1)).leases
        await here.queue.settle(lease, state=state)

        async with echo_pipeline(here.queue, here.registry, worker_id="decode-second") as second:
            answer = await request

        assert here.metric("pdq_migrations_total", reason="job_ended", resume="fresh") == 1
    assert answer.json()["choices"][0]["text"] == "hello" * 4
    assert second.taken.get_nowait().pair.gen == 2


async def test_a_queue_that_is_down_is_a_503_with_a_time_to_come_back(here, monkeypatch):
    async def refuse(job):
        raise QueueUnavailable("connection refused")

    monkeypatch.setattr(here.queue, "enqueue", refuse)

    answer = await here.http.post("/v1/completions", json={**TEXT, "stream": True})

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_unavailable")
    assert answer.headers["retry-after"] == "2"


class HungQueue:
    """Takes a job and says nothing until the test wants it to."""

    def __init__(self, here: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self._enqueue = here.queue.enqueue
        monkeypatch.setattr(here.queue, "enqueue", self.enqueue)

    async def enqueue(self, job):
        self.asked.set()
        await self.may_answer.wait()
        return await self._enqueue(job)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_is_kept_while_the_queue_hangs(monkeypatch, stream):
    async with world(GatewaySettings(http_port=0, queue_timeout_s=600.0)) as here:
        hung = HungQueue(here, monkeypatch)
        answer = await here.http.post("/v1/completions", json={**TEXT, "stream": stream, "request_timeout_s": 0.3})
        assert here.pipeline.taken.qsize() == 0
        hung.may_answer.set()

    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_the_queue_hangs_leaves_no_job(monkeypatch, stream):
    async with world(takes=False) as here:
        hung = HungQueue(here, monkeypatch)
        request = asyncio.create_task(here.http.post("/v1/completions", json={**TEXT, "stream": stream}))
        await hung.asked.wait()

        request.cancel()
        await here.until("pdq_requests_total", 1, endpoint="completions", outcome="cancelled")
        hung.may_answer.set()
        await asyncio.sleep(0)

        assert here.metric("pdq_requests_in_flight") == 0
        depth = await here.queue.depth()
        assert (depth.queued, depth.running) == (0, 0), "cancel beats enqueue"


async def test_missing_logprobs_are_an_error_not_an_answer_without_them(here):
    here.pipeline.script = lambda lease: Script(has_logprobs=False)

    answer = await here.http.post("/v1/completions", json={**TEXT, "logprobs": 1})

    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_error")


async def test_a_drain_answers_what_it_has_and_ends_the_rest_with_an_error():
    async with world() as here:
        here.pipeline.script = lambda lease: Script(stall_after=2)
        stalled = asyncio.create_task(stream_lines(here))
        await here.until("pdq_generated_tokens_total", 2)

        here.drain.request("test")
        lines = await stalled
        await here.running

        with pytest.raises(httpx.ConnectError):
            await here.http.get("/health")
    assert json.loads(lines[-2][6:])["error"]["code"] == "shutting_down"
    assert lines[-1] == "data: [DONE]"
