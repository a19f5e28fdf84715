"""The official `openai` client against the whole pipeline: what it sends is understood, what it gets it can parse."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.pipeline.harness import Pipeline, shared

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "What is a queue?"}]
CHAT_ECHO = "be brief\nWhat is a queue?"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pipeline]:
    async with shared(tmp_path_factory.mktemp("openai")) as shared_pipeline:
        yield shared_pipeline


@pytest_asyncio.fixture(loop_scope="module")
async def client(pipeline: Pipeline) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{pipeline.url}/v1", api_key="unused", max_retries=0, timeout=60
    ) as openai_client:
        yield openai_client


async def test_chat_is_answered_as_one_document(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=8, temperature=0)

    assert answer.choices[0].message.content == CHAT_ECHO[:8]
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(CHAT_ECHO), 8)
    assert answer.usage.total_tokens == len(CHAT_ECHO) + 8
    assert answer.model == "sim"
    assert answer.id.startswith("chatcmpl-")


async def test_a_chat_that_the_model_ends_has_the_finish_reason_stop(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="sim", messages=MESSAGES, max_completion_tokens=100)

    assert answer.choices[0].message.content == CHAT_ECHO
    assert answer.choices[0].finish_reason == "stop"


async def test_a_streamed_chat_is_the_same_text_with_usage_in_a_last_chunk(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="sim", messages=MESSAGES, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == CHAT_ECHO[:12]
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert not chunks[-1].choices
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (len(CHAT_ECHO), 12)
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


async def test_a_stream_without_include_usage_has_no_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=3, stream=True)

    assert [chunk.usage async for chunk in stream if chunk.usage] == []


async def test_chat_logprobs_stand_for_each_token_streamed_or_not(client: openai.AsyncOpenAI) -> None:
    wish: Any = {"model": "sim", "messages": MESSAGES, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}

    whole = await client.chat.completions.create(**wish)
    stream = await client.chat.completions.create(**wish, stream=True)

    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content
    assert entries is not None
    assert "".join(entry.token for entry in entries) == CHAT_ECHO[:6]
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in entries)
    streamed: list[Any] = []
    async for chunk in stream:
        for choice in chunk.choices:
            streamed += choice.logprobs.content or [] if choice.logprobs else []
    assert streamed == entries


async def test_completions_take_a_text_a_list_and_token_ids(client: openai.AsyncOpenAI) -> None:
    single = await client.completions.create(model="sim", prompt="one two three", max_tokens=5)
    several = await client.completions.create(model="sim", prompt=["first", "second", "third"], max_tokens=4)
    by_ids = await client.completions.create(model="sim", prompt=list(b"token ids"), max_tokens=5)

    assert single.choices[0].text == "one t"
    assert [(c.index, c.text) for c in several.choices] == [(0, "firs"), (1, "seco"), (2, "thir")]
    assert by_ids.choices[0].text == "token"


async def test_completion_logprobs_and_echo(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="sim", prompt="abcdef", max_tokens=3, logprobs=2, echo=True)

    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "abcdefabc"
    assert logprobs is not None
    assert logprobs.tokens == list("abcdefabc")
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.text_offset == list(range(9))


async def test_stop_strings_end_the_answer_streamed_or_not(client: openai.AsyncOpenAI, pipeline: Pipeline) -> None:
    wish: Any = {"model": "sim", "prompt": "count: 1, 2, 3, 4, 5", "max_tokens": 64, "stop": [", 3", "never"]}

    whole = await client.completions.create(**wish)
    stream = await client.completions.create(**wish, stream=True)
    streamed = [chunk.choices[0] async for chunk in stream]

    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("count: 1, 2", "stop")
    assert "".join(choice.text for choice in streamed) == "count: 1, 2"
    assert streamed[-1].finish_reason == "stop"
    await pipeline.quiet()


async def test_the_same_seed_gives_the_same_answer(client: openai.AsyncOpenAI) -> None:
    wish: Any = {"model": "sim", "prompt": "seeded", "max_tokens": 6, "temperature": 1.0, "seed": 7}

    texts = {(await client.completions.create(**wish)).choices[0].text for _ in range(3)}

    assert len(texts) == 1


async def test_characters_of_several_bytes_arrive_whole(client: openai.AsyncOpenAI) -> None:
    prompt = "naïve 漢字 🙂!"
    stream = await client.completions.create(model="sim", prompt=prompt, max_tokens=64, stream=True)
    pieces = [chunk.choices[0].text async for chunk in stream]

    assert "".join(pieces) == prompt
    assert not any("�" in piece for piece in pieces)


async def test_models_are_listed_and_found(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["sim"]
    assert (await client.models.retrieve("sim")).id == "sim"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4")


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99999999]}, "prompt"),
        ({"n": 5}, "n"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"logprobs": 1000}, "logprobs"),
        ({"prompt": "x" * 300_000}, "prompt"),
        ({"seed": "lucky"}, "seed"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_a_bad_request_is_a_bad_request_error_and_never_queued(
    client: openai.AsyncOpenAI, pipeline: Pipeline, wish: dict[str, Any], param: str
) -> None:
    last_entry = (await pipeline.redis.xinfo_stream(pipeline.key("prefill")))["last-generated-id"]

    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(**{"model": "sim", "prompt": "fine", "max_tokens": 4, **wish})

    assert caught.value.param == param
    assert caught.value.code
    assert caught.value.type == "invalid_request_error"
    assert (await pipeline.redis.xinfo_stream(pipeline.key("prefill")))["last-generated-id"] == last_entry


async def test_a_model_that_is_not_served_is_a_not_found_error(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)

    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
