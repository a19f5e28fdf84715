"""Real engines take a minute to start: one per module."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from engine.vllm.client import VllmEngine
from tests.vllm_adapter.fake_llm import FakeLlm, FakeProcesses, engine_over


@pytest.fixture(scope="module")
def own_environment() -> Iterator[None]:
    """What an engine sets for its processes must not reach other tests, nor what a vLLM leaves that can't start."""
    before = dict(os.environ)
    yield
    gc.collect()  # its ZeroMQ contexts say that nobody closed them: while this module's filter of warnings holds
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def llm() -> FakeLlm:
    return FakeLlm()


@pytest.fixture
async def engine(llm: FakeLlm) -> AsyncIterator[VllmEngine]:
    started = engine_over(FakeProcesses(llm))
    await started.start()
    llm.requests.clear()
    yield started
    await started.stop()
