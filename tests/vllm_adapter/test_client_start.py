"""What a started engine tells of itself, and what a failed start says."""

from __future__ import annotations

import asyncio

import pytest

from engine.base import EngineError
from pdq.wire.types import Capability
from tests.vllm_adapter.fake_llm import FakeProcesses, engine_over


async def test_what_is_known_after_the_start(llm):
    engine = engine_over(FakeProcesses(llm))

    info = await engine.start()
    await engine.stop()

    assert info.fingerprint == "block_size=32 mode=pull vllm=0.32.0 weights=abc"
    assert (info.engine_id, info.epoch, info.block_size, info.total_blocks, info.max_model_len) == (
        *("w1", "e1", 32),
        *(100, 2048),
    )
    assert (info.kv_source.host, info.kv_source.port, info.kv_source.tp_size) == ("127.0.0.1", 20001, 2)
    assert info.capabilities == tuple(Capability)


async def test_the_first_steps_are_made_before_the_engine_counts_as_ready(llm):
    engine = engine_over(FakeProcesses(llm))
    await engine.start()

    assert [sent.request_id for sent in llm.requests] == ["warm-up"]
    assert llm.requests[0].params["max_tokens"] == 2
    await engine.stop()


async def test_a_failed_start_says_why(llm):
    with pytest.raises(EngineError, match="vLLM refuses its configuration: no such dtype"):
        await engine_over(FakeProcesses(llm, start_error="vLLM refuses its configuration: no such dtype")).start()


async def test_an_engine_that_dies_while_it_warms_up_says_why(llm):
    engine = engine_over(FakeProcesses(llm, reason="ValueError: no kernel"))
    llm.die(RuntimeError("dead"))

    with pytest.raises(EngineError, match="vLLM's engine died: ValueError: no kernel"):
        await engine.start()
    await engine.stop()


async def test_an_engine_without_a_first_step_is_given_up_with_the_settings_name(llm):
    llm.is_hanging = True
    engine = engine_over(FakeProcesses(llm), start_s=0.05)

    async with asyncio.timeout(60):
        with pytest.raises(EngineError, match=r"no first step within 0.05 s \(vllm_start_s\)"):
            await engine.start()
    await engine.stop()
