"""Sixteen prompts through gateway, queue and two engines: the answers of one engine, token for token, from its KV."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.vllm.pair import Mode, Pair, tokens
from tests.vllm.prompts import AT_ONCE
from tests.vllm.reference import BLOCK_SIZE, MAX_TOKENS

SIXTEEN = 16
pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1800)]


@pytest.mark.parametrize("mode", ["push", "pull"])
async def test_answers_are_those_of_one_engine_and_blocks_arrive_unchanged(pair: Pair, mode: Mode) -> None:
    if mode == "pull":  # D would find in its prefix cache what was pushed
        await pair.forget_prefixes()
    began_at = time.monotonic()
    prompts, expected = pair.reference.prompts[:SIXTEEN], pair.reference.outputs

    async def ask(prompt: list[int]) -> list[int]:
        return await tokens(pair.pipelines[mode], prompt, MAX_TOKENS)

    alone = [number for number in range(len(prompts)) if number not in AT_ONCE]
    answers = {number: await ask(prompts[number]) for number in alone}
    together = await asyncio.gather(*(ask(prompts[number]) for number in AT_ONCE))
    answers |= dict(zip(AT_ONCE, together, strict=True))

    wrong = [
        f"prompt {number} ({len(prompts[number])} tokens): {answers[number]} instead of {expected[number]}"
        for number in range(len(prompts))
        if answers[number] != expected[number]
    ]
    assert not wrong, "\n".join(wrong)
    await pair.quiet()
    num_moved = moved_blocks_are_equal(pair, after=began_at)
    assert num_moved > sum(len(prompts[number]) // BLOCK_SIZE for number in alone) / 2, "most of it came from P"


def moved_blocks_are_equal(pair: Pair, *, after: float) -> int:
    """How many blocks were moved. Every one must hold at D what it held at P, all layers, every byte."""
    prefilled = {record["request"]: record for record in pair.records.events("blocks", after=after, side="P")}
    received = pair.records.events("blocks", after=after, side="D")
    for there in received:
        here = prefilled[there["request"]]
        assert there["digests"] == here["digests"][there["first"] :], (there, here)
    return sum(len(there["digests"]) for there in received)
