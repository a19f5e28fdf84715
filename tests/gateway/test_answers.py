"""Answers through the whole gateway: what a client gets when nothing goes wrong."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.chat_template import ChatTemplate
from gateway.tokenizer import ModelTokenizer
from pdq.wire.types import unpack_ids
from tests.gateway.conftest import World, world
from tests.gateway.echo_pipeline import Script
from tests.gateway.tokenizers_ import byte_level

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "sim", "prompt": "hello"}


async def events_of(here: World, path: str, body: dict, headers: dict | None = None) -> list[dict | str]:
    """The JSON documents of a stream; the last one is the word [DONE]."""
    response = await here.http.post(path, json={**body, "stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_a_chat_is_answered(here):
    answer = await here.openai.chat.completions.create(**CHAT, max_tokens=5)

    choice = answer.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("hello", "assistant", "length")
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_a_streamed_chat_says_the_same_and_each_chunk_names_it(here):
    stream = await here.openai.chat.completions.create(
        **CHAT, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]

    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert content == "hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices].count(None) == len(chunks) - 2
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 5
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_tokens_arrive_one_by_one(here):
    gate = asyncio.Semaphore(1)
    here.pipeline.script = lambda lease: Script(gate=gate)
    texts = []
    async for chunk in await here.openai.completions.create(**TEXT, max_tokens=3, stream=True):
        texts.append(chunk.choices[0].text)
        gate.release()

    assert texts[:2] == ["h", "e"]
    assert "".join(texts) == "hel"


async def test_without_max_tokens_the_rest_of_the_context_is_the_limit(here):
    here.pipeline.script = lambda lease: Script(eos_after=2)

    answer = await here.openai.completions.create(**TEXT)

    assert here.pipeline.taken.get_nowait().job.sampling.max_tokens == 131072 - 5
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("he", "stop")
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_the_text_and_stops_the_worker(here, stream):
    gate = asyncio.Semaphore(4)
    here.pipeline.script = lambda lease: Script(gate=gate)

    if stream:
        events = await events_of(here, "/v1/completions", {**TEXT, "stop": ["lo", "ll"], "max_tokens": 50})
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        finish = events[-2]["choices"][0]["finish_reason"]
    else:
        answer = await here.openai.completions.create(**TEXT, stop=["lo", "ll"], max_tokens=50)
        text, finish = answer.choices[0].text, answer.choices[0].finish_reason

    assert (text, finish) == ("he", "stop")
    assert (await here.pipeline.next_cancel()).reason == "stop_string"


async def test_a_stop_string_as_first_token_leaves_nothing(here):
    answer = await here.openai.chat.completions.create(**CHAT, stop="h", max_tokens=5)

    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1


async def test_multi_byte_characters_come_whole(here):
    events = await events_of(here, "/v1/completions", {**TEXT, "prompt": "né🙂\u2028\n好", "max_tokens": 14})

    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == "né🙂\u2028\n好"
    assert not any("\ufffd" in text for text in texts)


async def test_a_list_of_prompts_is_answered_in_order(here):
    answer = await here.openai.completions.create(model="sim", prompt=["abc", "xyz"], max_tokens=3)

    assert [(c.index, c.text) for c in answer.choices] == [(0, "abc"), (1, "xyz")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 6)


async def test_a_streamed_list_of_prompts_names_the_choice(here):
    events = await events_of(here, "/v1/completions", {"model": "sim", "prompt": ["abc", "xyz"], "max_tokens": 3})

    texts = {0: "", 1: ""}
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == {0: "abc", 1: "xyz"}


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]]])
async def test_token_ids_are_a_prompt_too(here, prompt):
    answer = await here.openai.completions.create(model="sim", prompt=prompt, max_tokens=2)

    assert answer.choices[0].text == "hi"


async def test_logprobs_of_a_chat_in_openai_s_shape(here):
    answer = await here.openai.chat.completions.create(**CHAT, max_tokens=2, logprobs=True, top_logprobs=2)

    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["h", "e"]
    assert content[0].bytes == [104]
    assert [top.token for top in content[0].top_logprobs] == ["a", "b"]


async def test_streamed_logprobs_belong_to_the_text_of_their_event(here):
    events = await events_of(here, "/v1/completions", {**TEXT, "max_tokens": 4, "logprobs": 1})

    choices = [event["choices"][0] for event in events[:-1]]
    reported = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert "".join("".join(entry["tokens"]) for entry in reported) == "hell"
    assert [offset for entry in reported for offset in entry["text_offset"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_reports_prompt_and_answer_with_logprobs(here, stream):
    body = {**TEXT, "max_tokens": 2, "logprobs": 1, "echo": True}
    if stream:
        choices = [event["choices"][0] for event in (await events_of(here, "/v1/completions", body))[:-1]]
        text = "".join(choice["text"] for choice in choices)
        tokens = [token for c in choices if c["logprobs"] for token in c["logprobs"]["tokens"]]
        first = choices[0]["logprobs"]["token_logprobs"][0]
        offsets = [offset for c in choices if c["logprobs"] for offset in c["logprobs"]["text_offset"]]
    else:
        choice = (await here.http.post("/v1/completions", json=body)).json()["choices"][0]
        text, tokens = choice["text"], choice["logprobs"]["tokens"]
        first, offsets = choice["logprobs"]["token_logprobs"][0], choice["logprobs"]["text_offset"]

    assert text == "hellohe"
    assert tokens == list("hellohe")
    assert first is None
    assert offsets == list(range(7))


async def test_echo_with_no_new_tokens_scores_the_prompt(here):
    answer = await here.http.post("/v1/completions", json={**TEXT, "max_tokens": 0, "logprobs": 0, "echo": True})

    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("hello", list("hello"))
    assert (choice["finish_reason"], usage["completion_tokens"]) == ("length", 0)


async def test_prompt_logprobs_and_token_ids_on_request(here):
    body = {**CHAT, "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True}

    answer = (await here.http.post("/v1/chat/completions", json=body)).json()

    assert answer["prompt_token_ids"] == list(b"hello")
    assert answer["choices"][0]["token_ids"] == list(b"he")
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1]["101"]["decoded_token"] == "e"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_trace_tells_the_way_on_request(here, stream):
    headers = {"X-Pdq-Trace": "1"}
    body = {**CHAT, "max_tokens": 2}
    if stream:
        trace = (await events_of(here, "/v1/chat/completions", body, headers))[-2]["pdq"]
    else:
        trace = (await here.http.post("/v1/chat/completions", json=body, headers=headers)).json()["pdq"]

    assert trace["decode_worker"] == "decode-echo"
    assert trace["prefill_worker"] == "prefill-decode-echo"
    assert (trace["mode"], trace["kv_bytes"], trace["kv_descriptors"], trace["kv_ms"]) == ("pull", 4096, 2, 1.0)
    assert (trace["gen"], trace["attempt"], trace["prefill_ms"]) == (1, 1, 10.0)
    assert trace["ttft_ms"] > 0


async def test_max_completion_tokens_goes_before_max_tokens(here):
    answer = await here.openai.chat.completions.create(**CHAT, max_completion_tokens=2, max_tokens=4)

    assert answer.usage.completion_tokens == 2


async def test_sampling_reaches_the_queue_as_it_was_sent(here):
    extra = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 1, "stop_token_ids": [5]}
    await here.openai.chat.completions.create(
        **CHAT, max_tokens=2, temperature=0, top_p=0.5, seed=42, extra_body={**extra, "ignore_eos": True, "priority": 5}
    )

    job = here.pipeline.taken.get_nowait().job
    sampling = job.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (7, 0.1, 1.2, 1)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.seed, sampling.top_p) == ((5,), True, 42, 0.5)
    assert sampling.is_greedy
    assert job.priority == 5


async def test_many_at_once_get_their_own_answers(here):
    prompts = [f"prompt {n}" for n in range(40)]
    same_id = {"X-Request-Id": "same"}

    answers = await asyncio.gather(
        *(
            here.openai.completions.create(model="sim", prompt=p, max_tokens=len(p), extra_headers=same_id)
            for p in prompts
        )
    )

    assert [answer.choices[0].text for answer in answers] == prompts
    assert len({answer.id for answer in answers}) == 40


async def test_a_real_tokenizer_s_template_writes_the_special_tokens_once():
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer = ModelTokenizer(byte_level(), ChatTemplate(source, {}), 512)
    async with world(tokenizer=tokenizer) as here:
        await here.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 1})
        await here.http.post("/v1/completions", json={**TEXT, "max_tokens": 1})

        chat, text = here.pipeline.taken.get_nowait().job, here.pipeline.taken.get_nowait().job
    assert unpack_ids(chat.prompt_ids).count(0) == 1
    assert unpack_ids(text.prompt_ids).count(0) == 1
