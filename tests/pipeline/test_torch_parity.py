"""A real model through every part, in each mode: greedy answers equal transformers' own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from engine.models.__main__ import default_cache_dir
from engine.models.store import prepare_model
from pdq.runtime.model import ModelSettings
from tests.pipeline.harness import running
from tests.pipeline.parity import check_parity
from tests.servers import RedisServer


@pytest.mark.torch
@pytest.mark.parametrize(
    ("num_prompts", "max_tokens", "long_tokens"),
    [
        pytest.param(9, 6, 1000, marks=pytest.mark.timeout(600)),  # a limit on the function itself would win over both
        pytest.param(60, 32, 3000, marks=[pytest.mark.long, pytest.mark.timeout(2400)]),
    ],
)
@pytest.mark.parametrize("mode", ["pull", "push", "local"])
async def test_greedy_answers_equal_those_of_generate(
    tmp_path: Path,
    private_redis: RedisServer,
    mode: Literal["pull", "push", "local"],
    num_prompts: int,
    max_tokens: int,
    long_tokens: int,
) -> None:
    model_dir = prepare_model("smollm2-135m", default_cache_dir())
    model = ModelSettings(model="smollm2-135m")
    async with running(
        tmp_path,
        private_redis,
        mode=mode,
        prefill=0 if mode == "local" else 2,
        decode=1,
        engine="torch",
        model=model,
        timeout_s=300,
    ) as pipeline:
        await check_parity(pipeline, model_dir, num_prompts=num_prompts, max_tokens=max_tokens, long_tokens=long_tokens)

        await pipeline.quiet()
        workers = (await pipeline.workers()).values()
        assert {record["role"] for record in workers} >= {"gateway", "decode"}
