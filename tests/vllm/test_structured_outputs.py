"""Output formats on real engines: the text conforms from its first token on, whichever way the KV comes."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest

from tests.vllm.pair import Mode, Pair

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1800)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION = "Marta sells bread on the corner of the market. She is 41 years old. Who sells bread, and how old is she?"
MODES: list[Mode] = ["push", "pull"]


async def chat(pair: Pair, mode: Mode, **fields: object) -> httpx.Response:
    pipeline = pair.pipelines[mode]
    body = {"model": pipeline.model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}
    return await pipeline.client.post("/v1/chat/completions", json=body | {"temperature": 0} | fields)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop", answer.text
    text: str = choice["message"]["content"]
    return text


@pytest.mark.parametrize("mode", MODES)
async def test_a_json_schema_rules_the_whole_text(pair: Pair, mode: Mode) -> None:
    described = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}

    person = json.loads(text_of(await chat(pair, mode, response_format=described)))

    assert person.keys() == {"name", "age"}
    assert isinstance(person["name"], str)
    assert 1 <= person["age"] <= 99


@pytest.mark.parametrize("mode", MODES)
async def test_the_other_kinds_rule_it_too(pair: Pair, mode: Mode) -> None:
    """Without them the model answers in plain English."""
    free = (await chat(pair, mode)).json()["choices"][0]["message"]["content"]
    assert not free.startswith(("{", "violet", "7", "no"))

    chosen = text_of(await chat(pair, mode, structured_outputs={"choice": ["violet", "crimson"]}))
    matched = text_of(await chat(pair, mode, structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"}))
    parsed = text_of(await chat(pair, mode, structured_outputs={"grammar": 'start: "no" ("," "no"){1,2}'}))

    assert chosen in ("violet", "crimson")
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", matched)
    assert parsed in ("no,no", "no,no,no")


async def test_formats_and_free_text_share_a_batch(pair: Pair) -> None:
    first, free, second = await asyncio.gather(
        chat(pair, "push", structured_outputs={"regex": "[0-9]{8}"}),
        chat(pair, "push"),
        chat(pair, "push", structured_outputs={"choice": ["violet"]}, logprobs=True),
    )

    assert re.fullmatch("[0-9]{8}", text_of(first))
    assert free.status_code == 200
    assert text_of(second) == "violet"


@pytest.mark.parametrize("mode", MODES)
async def test_what_only_vllm_refuses_is_the_clients_fault_and_is_tried_once(pair: Pair, mode: Mode) -> None:
    """llguidance, which the gateway asks, takes deeper schemas than vLLM does."""
    schema: dict[str, object] = {"type": "string"}
    for _ in range(70):
        schema = {"type": "array", "items": schema}

    answer = await chat(pair, mode, structured_outputs={"json": schema})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_output_format"), answer.text
    assert "nested too deeply" in error["message"]
