"""Bad requests: an OpenAI error object that names the field, and nothing in the queue."""

from __future__ import annotations

import json

import pytest

from gateway.settings import GatewaySettings
from tests.gateway.conftest import world

HI = [{"role": "user", "content": "hello"}]
CHAT = {"model": "sim", "messages": HI}
TEXT = {"model": "sim", "prompt": "hello"}


def chat(**fields):
    return "/v1/chat/completions", {**CHAT, **fields}


def text(**fields):
    return "/v1/completions", {**TEXT, **fields}


def without(field, path_and_body):
    path, body = path_and_body
    return path, {name: value for name, value in body.items() if name != field}


BAD = [
    (chat(model="other"), 404, "model_not_found", "model"),
    (without("model", chat()), 400, "invalid_value", "model"),
    (without("messages", chat()), 400, "invalid_value", "messages"),
    (chat(messages=[]), 400, "invalid_value", "messages"),
    (chat(messages="hello"), 400, "invalid_value", "messages"),
    (chat(messages=[{"role": "user"}]), 400, "invalid_value", "messages[0].content"),
    (chat(messages=[{"role": "king", "content": "x"}]), 400, "invalid_value", "messages[0].role"),
    (chat(messages=[{"role": "user", "content": 5}]), 400, "invalid_value", "messages[0].content"),
    (chat(messages=[{"role": "user", "content": ""}]), 400, "invalid_value", "messages"),
    (chat(messages=[{"role": "tool", "content": "x"}]), 400, "unsupported", "messages[0]"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "unsupported",
        "messages[0].content[0]",
    ),
    (chat(temperature="hot"), 400, "invalid_value", "temperature"),
    (chat(temperature=2.5), 400, "invalid_value", "temperature"),
    (chat(temperature=-1), 400, "invalid_value", "temperature"),
    (chat(top_p=0), 400, "invalid_value", "top_p"),
    (chat(top_k=-2), 400, "invalid_value", "top_k"),
    (chat(seed=2**63), 400, "invalid_value", "seed"),
    (chat(presence_penalty=3), 400, "invalid_value", "presence_penalty"),
    (chat(repetition_penalty=0), 400, "invalid_value", "repetition_penalty"),
    (chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
    (chat(max_tokens=-5), 400, "invalid_value", "max_tokens"),
    (chat(max_tokens=1.5), 400, "invalid_value", "max_tokens"),
    (chat(max_completion_tokens=0, max_tokens=5), 400, "invalid_value", "max_completion_tokens"),
    (chat(max_tokens=5, min_tokens=6), 400, "invalid_value", "min_tokens"),
    (chat(stop=["x"] * 17), 400, "invalid_value", "stop"),
    (chat(stop=[""]), 400, "invalid_value", "stop"),
    (chat(stop=5), 400, "invalid_value", "stop"),
    (chat(stop_token_ids=[-1]), 400, "invalid_value", "stop_token_ids[0]"),
    (chat(top_logprobs=2), 400, "invalid_value", "top_logprobs"),
    (chat(logprobs=True, top_logprobs=21), 400, "invalid_value", "top_logprobs"),
    (chat(stream="yes"), 400, "invalid_value", "stream"),
    (chat(stream_options={"include_usage": True}), 400, "invalid_value", "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 5}), 400, "invalid_value", "stream_options.include_usage"),
    (chat(stream=True, prompt_logprobs=1), 400, "unsupported", "prompt_logprobs"),
    (chat(echo=True), 400, "unsupported", "echo"),
    (chat(n=2), 400, "unsupported", "n"),
    (chat(tools=[{"type": "function"}]), 400, "unsupported", "tools"),
    (chat(tool_choice="required"), 400, "unsupported", "tool_choice"),
    (chat(response_format={"type": "xml"}), 400, "invalid_value", "response_format"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}}),
        400,
        "invalid_value",
        "response_format",
    ),
    (chat(response_format="json"), 400, "invalid_value", "response_format"),
    (text(structured_outputs={"json": "{"}), 400, "invalid_value", "structured_outputs.json"),
    (text(structured_outputs={"json": [1]}), 400, "invalid_value", "structured_outputs.json"),
    (text(structured_outputs={"json_object": False}), 400, "invalid_value", "structured_outputs.json_object"),
    (text(structured_outputs={"choice": []}), 400, "invalid_value", "structured_outputs.choice"),
    (text(structured_outputs={"regex": " "}), 400, "invalid_value", "structured_outputs.regex"),
    (text(structured_outputs={"regex": "a", "choice": ["a"]}), 400, "invalid_value", "structured_outputs"),
    (text(structured_outputs={"structural_tag": "x"}), 400, "invalid_value", "structured_outputs"),
    (
        text(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        400,
        "invalid_value",
        "structured_outputs",
    ),
    (text(structured_outputs={"regex": "(a"}), 400, "invalid_output_format", "structured_outputs"),
    (text(structured_outputs={"grammar": "start: nobody"}), 400, "invalid_output_format", "structured_outputs"),
    (
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objct"}}}),
        400,
        "invalid_output_format",
        "response_format",
    ),
    (chat(logit_bias={"5": 1}), 400, "unsupported", "logit_bias"),
    (chat(guided_json={}), 400, "unsupported", "guided_json"),
    (chat(modalities=["audio"]), 400, "unsupported", "modalities"),
    (chat(request_timeout_s=0), 400, "invalid_value", "request_timeout_s"),
    (chat(priority="high"), 400, "invalid_value", "priority"),
    (text(best_of=2), 400, "unsupported", "best_of"),
    (text(suffix="x"), 400, "unsupported", "suffix"),
    (text(prompt=""), 400, "invalid_value", "prompt"),
    (text(prompt=[]), 400, "invalid_value", "prompt"),
    (text(prompt=["a", ""]), 400, "invalid_value", "prompt[1]"),
    (text(prompt=[1, "a"]), 400, "invalid_value", "prompt"),
    (text(prompt=[-1]), 400, "invalid_value", "prompt"),
    (text(prompt=[258]), 400, "invalid_value", "prompt"),
    (text(prompt=["x"] * 129), 400, "invalid_value", "prompt"),
    (text(max_tokens=0), 400, "invalid_value", "max_tokens"),
    (text(logprobs=21), 400, "invalid_value", "logprobs"),
    (text(prompt="x" * 200_000), 400, "context_length_exceeded", "prompt"),
    (text(max_tokens=131_072), 400, "context_length_exceeded", "prompt"),
]


async def test_every_bad_request_is_named_and_none_is_queued(here):
    for (path, body), status, code, param in BAD:
        answer = await here.http.post(path, json=body)

        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), (body, answer.text)
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        assert answer.headers["x-request-id"]
    assert here.pipeline.taken.empty()
    assert (await here.queue.depth()).queued == 0
    refused = sum(here.metric("pdq_requests_total", endpoint=e, outcome="refused") for e in ("chat", "completions"))
    assert refused == len(BAD)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"model": "sim", "messages": [}'])
async def test_a_body_that_is_no_json_object_is_refused(here, body):
    answer = await here.http.post("/v1/chat/completions", content=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_numbers_that_json_has_not_are_refused(here):
    answer = await here.http.post("/v1/completions", content=json.dumps({**TEXT, "temperature": float("nan")}))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


async def test_another_content_type_is_refused(here):
    answer = await here.http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_content_type")


async def test_unknown_fields_and_harmless_values_are_ignored(here):
    fields = {"n": 1, "tools": [], "logit_bias": None, "user": "me", "store": False, "some_new_field": {"a": 1}}

    answer = await here.http.post("/v1/chat/completions", json={**CHAT, **fields, "max_tokens": 1})

    assert answer.status_code == 200


async def test_the_context_error_has_both_numbers(here):
    answer = await here.http.post("/v1/completions", json={**TEXT, "max_tokens": 131_070})

    message = answer.json()["error"]["message"]
    assert "131072 tokens" in message
    assert "131075 tokens (5 in the prompt, 131070 in the completion)" in message


async def test_a_large_body_is_refused_with_or_without_its_length():
    async with world(GatewaySettings(http_port=0, max_body_bytes=1000)) as here:

        async def chunks():
            for _ in range(20):
                yield b" " * 100

        answers = [
            await here.http.post("/v1/completions", content=b" " * 1001),
            await here.http.post("/v1/completions", content=chunks()),
        ]

    assert [(a.status_code, a.json()["error"]["code"]) for a in answers] == [(413, "body_too_large")] * 2


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "soon"])
async def test_a_bad_timeout_header_is_refused(here, given):
    answer = await here.http.post("/v1/completions", json=TEXT, headers={"X-Request-Timeout-S": given})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Timeout-S")


async def test_unknown_paths_and_methods_have_error_objects_too(here):
    missing = await here.http.get("/v1/embeddings")
    method = await here.http.get("/v1/chat/completions")

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (method.status_code, method.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_an_api_key_guards_all_but_health_and_readiness():
    async with world(GatewaySettings(http_port=0, api_key="secret")) as here:
        paths = ["/v1/models", "/metrics", "/docs", "/openapi.json", "/v1/nothing"]
        without_key = [(await here.http.get(path)).status_code for path in paths]
        wrong = await here.http.post("/v1/completions", json=TEXT, headers={"authorization": "Bearer secre"})
        right = await here.http.post(
            "/v1/completions", json={**TEXT, "max_tokens": 1}, headers={"authorization": "Bearer secret"}
        )
        is_open = [(await here.http.get(path)).status_code for path in ("/health", "/ready")]

    assert without_key == [401] * 5
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
    assert right.status_code == 200
    assert is_open == [200, 200]


async def test_too_many_requests_are_refused_with_a_time_to_come_back():
    async with world(GatewaySettings(http_port=0, max_queued=2), takes=False) as here:
        answer = await here.http.post("/v1/completions", json={**TEXT, "prompt": ["a", "b", "c"]})

    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert answer.headers["retry-after"] == "1"
