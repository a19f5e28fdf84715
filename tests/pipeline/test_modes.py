"""Push, pull and local: the same requests, the same answers, nothing left behind; also with pools of a few prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

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
async def test_each_mode_goes_its_way(
    tmp_path: Path, private_redis: RedisServer, mode: Literal["push", "pull", "local"]
) -> None:
    async with running(tmp_path, private_redis, mode=mode, prefill=0 if mode == "local" else 1) as pipeline:
        await run_mixed(pipeline, mixed_requests(20, seed=1), concurrency=4)

        assert await routed(pipeline) == {(mode, "mode"): 20}
        await pipeline.quiet()


SMALL_POOLS = {"PDQ_PREFILL_WORKER__NUM_BLOCKS": "24", "PDQ_DECODE_WORKER__NUM_BLOCKS": "24"}


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_pools_of_a_few_prompts_park_and_wait_but_never_lock_up(
    tmp_path: Path, private_redis: RedisServer, mode: Literal["push", "pull"]
) -> None:
    async with running(tmp_path, private_redis, mode=mode, environ=SMALL_POOLS) as pipeline:
        asked = mixed_requests(200, seed=2, lengths=(1, 16, 17, 100, 150, 300))

        await run_mixed(pipeline, asked, concurrency=32)

        await pipeline.quiet()


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("mixes", [50, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
async def test_random_mixes_of_four_long_prompts_on_two_and_two_small_workers_never_lock_up(
    tmp_path: Path, private_redis: RedisServer, mode: Literal["push", "pull"], mixes: int
) -> None:
    async with running(
        tmp_path, private_redis, mode=mode, prefill=2, decode=2, environ=SMALL_POOLS, log_level="warning"
    ) as pipeline:
        for seed in range(mixes):
            await run_mixed(pipeline, mixed_requests(4, seed=seed, lengths=(150, 200, 300, 340)), concurrency=4)

        await pipeline.quiet()


async def test_short_prompts_skip_the_queue_and_long_ones_do_not(tmp_path: Path, private_redis: RedisServer) -> None:
    environ = {"PDQ_GATEWAY__LOCAL_MAX_TOKENS": "128", "PDQ_GATEWAY__NOTICE_TRIES": "100"}
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
