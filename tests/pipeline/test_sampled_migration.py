"""A real model, sampled with seeds and penalties: a decode worker that dies in mid-stream changes no token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pdq.runtime.model import ModelSettings
from tests.pipeline import process_logs
from tests.pipeline.harness import Pipeline, eventually, running
from tests.servers import RedisServer

MAX_TOKENS = 64
KILLED_AFTER = 6
WAYS: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"temperature": 0.9, "seed": 7},
    "seed and top_p": {"temperature": 1.2, "top_p": 0.8, "seed": 8},
    "penalties": {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.8},
    "seed and penalties": {"temperature": 0.9, "seed": 9, "presence_penalty": 0.7, "frequency_penalty": 0.4},
}


async def stream(pipeline: Pipeline, way: str, token_ids: list[int]) -> None:
    """Adds to `token_ids` as they come."""
    body = {
        "model": pipeline.model,
        "prompt": "Once upon a time there was a small robot who",
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
        **WAYS[way],
    }
    async with pipeline.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                token_ids += event["choices"][0].get("token_ids") or []


async def streams(pipeline: Pipeline, *, is_killed: bool) -> dict[str, list[int]]:
    """All ways at once; `is_killed`: the only decode worker, when each stream has begun."""
    answers: dict[str, list[int]] = {way: [] for way in WAYS}
    async with asyncio.TaskGroup() as group:
        for way, token_ids in answers.items():
            group.create_task(stream(pipeline, way, token_ids))
        if is_killed:

            async def too_short() -> str:
                shortest = min(len(token_ids) for token_ids in answers.values())
                return "" if shortest >= KILLED_AFTER else f"{shortest} tokens"

            await eventually(too_short, limit_s=120, what="streams under way")
            pipeline.kill("decode-1")
            longest = max(len(token_ids) for token_ids in answers.values())
            assert longest < MAX_TOKENS, "all are in the middle"
    return answers


@pytest.mark.torch
@pytest.mark.timeout(600)
async def test_streams_with_seeds_and_penalties_go_on_with_the_same_tokens(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    model = ModelSettings(model="smollm2-135m")
    async with running(
        tmp_path, private_redis, prefill=1, decode=1, engine="torch", model=model, timeout_s=300
    ) as pipeline:
        undisturbed = await streams(pipeline, is_killed=False)
        assert all(len(token_ids) == MAX_TOKENS for token_ids in undisturbed.values())
        assert len({tuple(token_ids) for token_ids in undisturbed.values()}) == len(WAYS), "each way has its own text"

        killed = await streams(pipeline, is_killed=True)

        assert killed == undisturbed
        migrated = process_logs.events(pipeline.log_dir, "request_migrated", "gateway-1")
        assert len(migrated) == len(WAYS)
        assert all(event["num_tokens"] >= KILLED_AFTER for event in migrated)
        print("resumed:", sorted(event["resume"] for event in migrated))
        await pipeline.quiet()
