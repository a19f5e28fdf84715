"""Clients that look alike never get each other's answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.pipeline.harness import Pipeline, shared
from tests.pipeline.ledger import Ledger, text_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_CLIENTS = 100


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pipeline]:
    async with shared(tmp_path_factory.mktemp("isolation"), prefill=2, decode=2) as shared_pipeline:
        yield shared_pipeline


async def test_a_hundred_requests_with_one_id_and_one_prefix_get_their_own_answers(pipeline: Pipeline) -> None:
    ledger = Ledger(pipeline.client)
    rng = random.Random(17)
    prefix = text_of(160, rng)
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            # The answer reaches beyond the shared prefix, into what is this client's alone.
            prompt = prefix[: rng.choice((0, 16, 31, 160))] + f"{number:03} {text_of(40, rng)}"
            group.create_task(
                ledger.ask(prompt, max_tokens=210, stream=number % 2 == 0, headers={"X-Request-Id": "the-same"})
            )

    ledger.all_right()
    assert len({line.text for line in ledger.lines}) == NUM_CLIENTS
    assert {line.request_id for line in ledger.lines} == {"the-same"}
    await pipeline.quiet()


async def test_equal_prompts_at_the_same_time_are_each_answered_whole(pipeline: Pipeline) -> None:
    ledger = Ledger(pipeline.client)
    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(ledger.ask("all ask the same question " * 8, max_tokens=100, stream=number % 2 == 0))

    ledger.all_right()
    await pipeline.quiet()


async def test_a_strange_request_id_is_cleaned_and_never_a_key(pipeline: Pipeline) -> None:
    for given in ("../../etc/passwd", "a b\tc", "{sim}:req:*", "x" * 5000, "é"):
        response = await pipeline.client.post(
            "/v1/completions",
            json={"model": "sim", "prompt": "who am I?", "max_tokens": 3},
            headers={"X-Request-Id": given.encode()},
        )

        assert response.status_code == 200
        echoed = response.headers["x-request-id"]
        assert 1 <= len(echoed) <= 128
        assert echoed.isascii()
        assert echoed.isprintable()
    keys = [key.decode() async for key in pipeline.redis.scan_iter("*:req:*")]
    assert len(keys) >= 5
    assert all(key.split(":")[3].isalnum() for key in keys)
