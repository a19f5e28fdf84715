"""vLLM preempts on the decode side: the answers stay those of one engine. (The prefill side: test_worker_deaths.)"""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.vllm.pair import Pair, tokens
from tests.vllm.prompts import SPARE, SPARE_SHORT
from tests.vllm.reference import MAX_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1800)]


async def test_on_decode_when_answers_grow_in_a_full_pool(pair: Pair) -> None:
    """Four prompts fill D's pool while their KV is held back; then each wants one block more."""
    began_at = time.monotonic()
    numbers = [*SPARE[:3], SPARE_SHORT]
    pair.records.hold()
    pull = pair.pipelines["pull"]
    asking = [asyncio.create_task(tokens(pull, pair.reference.prompts[number], MAX_TOKENS)) for number in numbers]
    await pair.states(["decoding"] * len(numbers))
    assert not pair.records.events("preempted", after=began_at)

    pair.records.release()
    answers = await asyncio.gather(*asking)

    assert pair.records.events("preempted", after=began_at)
    assert answers == [pair.reference.outputs[number] for number in numbers]
