"""A request that moves to another decode worker in mid-answer: the client can't tell where the seam is.

The first worker fails after a number of tokens, the next one goes on from what was delivered.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gateway.settings import GatewaySettings
from tests.gateway.conftest import World, eventually, world
from tests.gateway.echo_pipeline import Script

MAX_TOKENS = 12


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[World]:
    async with world(GatewaySettings(http_port=0, max_migrations=20)) as it:
        yield it


pytestmark = pytest.mark.asyncio(loop_scope="module")


def fails_after(here: World, *nums_tokens: int) -> None:
    """The first attempt after so many tokens, the second after so many more, ...; then none."""

    def script(lease: Any) -> Script:
        gen = lease.pair.gen
        if gen <= len(nums_tokens):
            return Script(fail_after=nums_tokens[gen - 1], is_retryable=True)
        return Script()

    here.pipeline.script = script


async def complete(here: World, *, stream: bool, prompt: str = "hello", **fields: object) -> dict[str, Any]:
    """Text, finish_reason, usage and logprobs, from a document or put together from a stream."""
    body = {"model": "sim", "prompt": prompt, "max_tokens": MAX_TOKENS, "stream": stream, **fields}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = await here.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        document = answer.json()
        return {**document["choices"][0], "usage": document["usage"]}
    found: dict[str, Any] = {"text": "", "logprobs": {"tokens": [], "token_logprobs": [], "text_offset": []}}
    for line in answer.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        assert "error" not in event, event
        found["usage"] = event.get("usage") or found.get("usage")
        for choice in event["choices"]:
            found["text"] += choice["text"]
            found["finish_reason"] = choice["finish_reason"]
            for name, values in found["logprobs"].items():
                values += (choice["logprobs"] or {}).get(name, [])
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seams", [(1,), (5,), (11,), (0, 3, 0, 2)])
async def test_text_usage_and_log_probabilities_are_those_of_an_unbroken_answer(
    shared: World, stream: bool, seams: tuple[int, ...]
) -> None:
    fails_after(shared)
    unbroken = await complete(shared, stream=stream, logprobs=1)
    fails_after(shared, *seams)

    migrated = await complete(shared, stream=stream, logprobs=1)

    assert migrated["text"] == unbroken["text"] == ("hello" * 3)[:MAX_TOKENS]
    usage = migrated["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, MAX_TOKENS)
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert migrated["logprobs"][name] == unbroken["logprobs"][name], name
    assert migrated["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seam", range(1, 8))
async def test_a_stop_string_is_found_wherever_the_seam_is(shared: World, stream: bool, seam: int) -> None:
    fails_after(shared, seam)

    answer = await complete(shared, stream=stream, stop=["lohe"])

    assert answer["text"] == "hel"
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seam", range(1, 6))
async def test_a_character_of_several_tokens_survives_a_seam_in_its_middle(
    shared: World, stream: bool, seam: int
) -> None:
    fails_after(shared, seam)

    answer = await complete(shared, stream=stream, prompt="a😀b", max_tokens=6)

    assert answer["text"] == "a😀b"


@pytest.mark.parametrize("stream", [False, True])
async def test_with_every_token_delivered_and_only_the_end_lost_nothing_is_decoded_again(
    shared: World, stream: bool
) -> None:
    shared.pipeline.script = lambda lease: Script(loses_finish=True, is_retryable=True)
    while not shared.pipeline.taken.empty():
        shared.pipeline.taken.get_nowait()

    answer = await complete(shared, stream=stream)

    assert answer["text"] == ("hello" * 3)[:MAX_TOKENS]
    assert (answer["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", MAX_TOKENS)
    assert shared.pipeline.taken.qsize() == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ended_with_eos_is_over_whatever_its_worker_says_afterwards(
    shared: World, stream: bool
) -> None:
    shared.pipeline.script = lambda lease: Script(eos_after=4, fails_after_end=True, is_retryable=True)
    while not shared.pipeline.taken.empty():
        shared.pipeline.taken.get_nowait()

    answer = await complete(shared, stream=stream)

    assert (answer["text"], answer["finish_reason"]) == ("hell", "stop")
    assert shared.pipeline.taken.qsize() == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_meets_a_worker_with_a_shorter_context_goes_on_at_another(
    shared: World, stream: bool
) -> None:
    shared.pipeline.script = lambda lease: Script(cut_after=4 if lease.pair.gen == 1 else None)

    answer = await complete(shared, stream=stream)

    assert answer["text"] == ("hello" * 3)[:MAX_TOKENS]
    assert (answer["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", MAX_TOKENS)


@pytest.mark.parametrize(
    ("fields", "resume"),
    [
        ({}, "exact"),
        ({"temperature": 0, "seed": 7}, "exact"),
        ({"temperature": 1, "seed": 7}, "approximate"),
        ({"presence_penalty": 1}, "approximate"),
    ],
)
async def test_whether_the_client_could_tell_is_counted(shared: World, fields: dict[str, Any], resume: str) -> None:
    fails_after(shared, 2)
    labels = {"reason": "engine_error", "resume": resume}
    before = shared.metric("pdq_migrations_total", **labels)

    await complete(shared, stream=True, **fields)

    assert shared.metric("pdq_migrations_total", **labels) == before + 1


async def test_engines_that_round_otherwise_each_time_are_counted_as_such() -> None:
    async with world() as here:
        record = dataclasses.replace(here.pipeline.record("decode"), worker_id="decode-bf16", capabilities="logprobs")
        await here.registry.heartbeat(record)

        async def has_said_so() -> bool:
            fails_after(here, 2)
            await complete(here, stream=False)
            return here.metric("pdq_migrations_total", reason="engine_error", resume="approximate") > 0

        await eventually(has_said_so)
