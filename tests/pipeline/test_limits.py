"""What can never be served is said at once: prompts beyond the KV pools, and models that no worker has."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.pipeline.harness import Pipeline, running
from tests.pipeline.roles import serving
from tests.servers import RedisServer

POOL_TOKENS = 8 * 16


async def refusal(pipeline: Pipeline, *, prompt_tokens: int, max_tokens: int | None) -> dict[str, str]:
    body: dict[str, object] = {"model": "sim", "prompt": "x" * prompt_tokens}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    answer = await pipeline.client.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, str] = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    return error


@pytest.mark.parametrize("small", ["PREFILL_WORKER", "DECODE_WORKER"])
async def test_a_request_beyond_the_kv_pool_is_refused_before_it_is_queued_and_one_that_fills_it_is_served(
    small: str, tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis, environ={f"PDQ_{small}__NUM_BLOCKS": "8"}) as pipeline:
        for prompt_tokens, max_tokens in ((POOL_TOKENS - 7, 8), (POOL_TOKENS, 1)):
            error = await refusal(pipeline, prompt_tokens=prompt_tokens, max_tokens=max_tokens)
            assert f"maximum context length is {POOL_TOKENS} tokens" in error["message"]
            assert f"{prompt_tokens} in the prompt, {max_tokens} in the completion" in error["message"]
        error = await refusal(pipeline, prompt_tokens=POOL_TOKENS, max_tokens=None)
        assert f"your prompt has {POOL_TOKENS} tokens, which leaves no room" in error["message"]
        assert await pipeline.redis.keys(pipeline.key("req:*")) == []

        for prompt_tokens, max_tokens in ((POOL_TOKENS - 8, 8), (POOL_TOKENS - 1, 1)):
            answer = await pipeline.complete("y" * prompt_tokens, max_tokens=max_tokens)
            assert answer["choices"][0]["text"] == "y" * max_tokens
        await pipeline.quiet()


async def test_what_no_engine_here_can_do_is_refused_before_it_is_queued(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis) as pipeline:
        body = {"model": "sim", "prompt": "x", "response_format": {"type": "json_object"}}
        answer = await pipeline.client.post("/v1/completions", json=body)

        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported", "response_format")
        assert "has no structured_outputs" in error["message"]
        assert await pipeline.redis.keys(pipeline.key("req:*")) == []
        (record,) = [
            await pipeline.redis.hgetall(key) for key in await pipeline.redis.keys(pipeline.key("worker:decode-*"))
        ]
        assert record[b"capabilities"] == b"logprobs prompt_logprobs resume_exact"


async def test_the_workers_own_limit_on_tokens_holds_at_the_gateway(tmp_path: Path, private_redis: RedisServer) -> None:
    async with running(tmp_path, private_redis, environ={"PDQ_DECODE_WORKER__MAX_MODEL_LEN": "100"}) as pipeline:
        error = await refusal(pipeline, prompt_tokens=90, max_tokens=11)
        assert "maximum context length is 100 tokens" in error["message"]
        models = (await pipeline.client.get("/v1/models")).json()
        assert models["data"][0]["max_model_len"] == 100

        await pipeline.complete("x" * 90, max_tokens=10)


def test_a_gateway_of_another_model_than_the_workers_is_not_ready(private_redis: RedisServer) -> None:
    with (
        serving("prefill_worker", private_redis),
        serving("gateway", private_redis, "--served-model-name", "other") as gateway,
    ):
        answer = httpx.get(f"{gateway['http']}/ready", timeout=10)

    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["no_prefill_worker", "no_decode_worker"]
