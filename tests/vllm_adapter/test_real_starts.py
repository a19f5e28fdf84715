"""Starts of vLLM that fail or are given up."""

from __future__ import annotations

import asyncio

import pytest

from engine.base import EngineError
from tests.pipeline.harness import eventually
from tests.vllm_adapter.real_engines import ARGUMENTS, engine_processes, new_engine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.usefixtures("own_environment"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--blok-size 32", r"--engine-args: unrecognized arguments: --blok-size 32 \(did you mean --block-size\?"),
        ("--dtype float33", r"--engine-args: argument --dtype: .*float33.*float32"),
        ("--max-num-seqs many", r"--engine-args: argument --max-num-seqs: .*many"),
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size is 2, must be 1"),
        ("--data-parallel-size 2", "--data-parallel-size is 2, must be 1: .*start more workers"),
        ("--quantization no-such", "no-such"),
    ],
)
async def test_arguments_that_vllm_does_not_take_are_named_with_what_is_allowed(arguments, named):
    engine = new_engine(arguments)

    with pytest.raises(EngineError, match=named):
        await engine.start()
    assert engine_processes() == []


async def test_what_vllm_says_in_its_own_process_is_the_reason():
    engine = new_engine(f"{ARGUMENTS} --kv-cache-memory-bytes 100000")

    with pytest.raises(EngineError, match=r"vLLM didn't start: ValueError: .*(KV cache|memory)"):
        await engine.start()
    assert engine_processes() == []


async def test_a_start_that_is_given_up_leaves_no_process():
    engine = new_engine()
    starting = asyncio.create_task(engine.start())
    await eventually(_nothing_started, limit_s=300, what="process of the engine")
    starting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await starting
    await engine.stop()
    assert engine_processes() == []


async def _nothing_started() -> str:
    return "" if engine_processes() else "none yet"
