"""A gateway keeps nothing of a request that is over, however it ended, nor of workers that are gone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter

import httpx
import pytest

from gateway.exchange import Exchange
from gateway.session import Session
from gateway.settings import GatewaySettings
from tests.gateway.conftest import World, world
from tests.gateway.echo_pipeline import Script, echo_pipeline
from tests.leftovers import held, no_more_than

pytestmark = pytest.mark.timeout(300)  # many requests, on a machine that may be busy


def what_is_held() -> Counter[str]:
    return held(Exchange, Session)


async def ask(client: httpx.AsyncClient, number: int) -> None:
    """Every seventh client leaves; the others get their answer, whatever becomes of the first attempt."""
    body = {"model": "sim", "prompt": "hello", "max_tokens": 20, "stream": number % 2 == 0}
    if number % 7 == 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.post("/v1/completions", json=body)
        return
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


async def many(here: World, count: int) -> None:
    """Over connections of their own."""
    async with httpx.AsyncClient(base_url=here.url, timeout=60) as client, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(ask(client, number))


async def leave_while_it_decodes(here: World) -> None:
    """So that the link is there over which a decode worker is told."""
    here.pipeline.script = lambda lease: Script(stall_after=2)
    body = {"model": "sim", "prompt": "hello", "max_tokens": 20}
    request = asyncio.create_task(here.http.post("/v1/completions", json=body))
    await here.until("pdq_generated_tokens_total", 2)
    request.cancel()
    await here.pipeline.next_cancel()


async def test_requests_that_ended_in_every_way_leave_nothing() -> None:
    numbers = itertools.count()

    def script(lease: object) -> Script:
        number = next(numbers)
        if number % 5 == 0:
            return Script(fail_after=3, is_retryable=True)
        return Script(forgets_after=2) if number % 11 == 0 else Script()

    async with world(GatewaySettings(http_port=0, max_migrations=100)) as here:
        before = what_is_held()
        await leave_while_it_decodes(here)
        here.pipeline.script = script
        await many(here, 10)
        before |= what_is_held() - Counter({"Exchange": 100, "Session": 100})  # links and pools that stay

        for _ in range(3):
            await many(here, 40)

        await no_more_than(before, what_is_held)


async def test_decode_workers_that_die_leave_no_tasks_and_no_requests() -> None:
    settings = GatewaySettings(http_port=0, owner_silence_s=0.2, owner_check_s=0.05)
    async with world(settings, takes=False) as here:

        async def one_life(name: str) -> None:
            num_tokens = here.metric("pdq_generated_tokens_total")
            async with echo_pipeline(here.queue, here.registry, worker_id=name) as pipeline:
                pipeline.script = lambda lease: Script(stall_after=3)
                body = {"model": "sim", "prompt": "hello", "max_tokens": 20}
                request = asyncio.create_task(here.http.post("/v1/completions", json=body))
                await here.until("pdq_generated_tokens_total", num_tokens + 3)
            async with echo_pipeline(here.queue, here.registry, worker_id=f"{name}-heir"):
                assert (await request).status_code == 200

        await one_life("d0")
        before = what_is_held()
        del before["fds"]  # links to the dead are closed when nobody has used them for a minute

        for number in range(1, 5):
            await one_life(f"d{number}")

        await no_more_than(before + Counter({"fds": 10**6}), what_is_held)
