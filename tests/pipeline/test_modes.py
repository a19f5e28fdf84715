"""Push, pull and local: the same requests, the same answers, nothing left behind; also with pools of a few prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline.harness import Pipeline, running
from tests.pipeline.mixed_load import mixed_requests, run_mixed
from tests.servers import RedisServer

MODES = ("push", "pull", "local")


async def routed(pipeline: Pipeline) -> dict[tuple[str, str], float]:
    """How many prompts went which way, and why."""
    text = (await pipeline.client.get("/metrics")).text
    found = {}
    for line in text.splitlines():
        if line.startswith("pdq_requests_routed_total{"):
            labels, value = line[len("pdq_requests_routed_total{") :].split("} ")
            pairs = dict(label.split("=") for label in labels.replace('"', "").split(","))
            found[pairs["mode"], pairs["reason"]] = float(value)
    return found


@pytest.mark.parametrize("mode", MODES)
async def test_mixed_requests_are_all_answered_right_and_leave_nothing(
    tmp_path: Path, private_redis: RedisServer, mode: str
) -> None:
    prefill = 0 if mode == "local" else 3
    async with running(tmp_path, private_redis, mode=mode, prefill=prefill, decode=2) as pipeline:
        await run_mixed(pipeline, mixed_requests(400, seed=1), concurrency=64)

        assert await routed(pipeline) == {(mode, "mode"): 400}
        await pipeline.quiet()


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_pools_of_a_few_prompts_park_and_wait_but_never_lock_up(
    tmp_path: Path, private_redis: RedisServer, mode: str
) -> None:
    environ = {"PDQ_PREFILL_WORKER__NUM_BLOCKS": "24", "PDQ_DECODE_WORKER__NUM_BLOCKS": "24"}
    async with running(tmp_path, private_redis, mode=mode, environ=environ) as pipeline:
        asked = mixed_requests(200, seed=2, lengths=(1, 16, 17, 100, 150, 300))

        await run_mixed(pipeline, asked, concurrency=32)

        await pipeline.quiet()


async def test_short_prompts_skip_the_queue_and_long_ones_do_not(tmp_path: Path, private_redis: RedisServer) -> None:
    environ = {"PDQ_GATEWAY__LOCAL_MAX_TOKENS": "128"}
    async with running(tmp_path, private_redis, environ=environ) as pipeline:
        short = await pipeline.client.post(
            "/v1/completions",
            json={"model": "sim", "prompt": "short", "max_tokens": 3},
            headers={"X-Pdq-Trace": "1"},
        )
        long = await pipeline.client.post(
            "/v1/completions",
            json={"model": "sim", "prompt": "long" * 50, "max_tokens": 3},
            headers={"X-Pdq-Trace": "1"},
        )

        assert (short.json()["pdq"]["mode"], short.json()["pdq"]["mode_reason"]) == ("local", "short_prompt")
        assert short.json()["pdq"]["prefill_worker"] is None
        assert (long.json()["pdq"]["mode"], long.json()["choices"][0]["text"]) == ("pull", "lon")
        assert await routed(pipeline) == {("local", "short_prompt"): 1, ("pull", "mode"): 1}
        await pipeline.quiet()
