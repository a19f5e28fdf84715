"""Greedy parity of the whole pipeline with transformers' own `generate`: same weights, float32, token for token."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.pipeline.harness import Pipeline
from tests.torch.parity import parity_prompts, reference_generate


async def check_parity(
    pipeline: Pipeline, model_dir: Path, *, num_prompts: int, max_tokens: int, long_tokens: int
) -> None:
    """One at a time, then 16 at once. Raises AssertionError naming the prompts that differ."""
    prompts = parity_prompts(model_dir, num_prompts, long_tokens=long_tokens)
    expected = await asyncio.to_thread(reference_generate, model_dir, prompts, max_tokens)
    one_by_one = [await generate(pipeline, prompt, max_tokens) for prompt in prompts]
    compare("one at a time", prompts, expected, one_by_one)
    at_once = asyncio.Semaphore(16)

    async def limited(prompt: list[int]) -> list[int]:
        async with at_once:
            return await generate(pipeline, prompt, max_tokens)

    together = await asyncio.gather(*(limited(prompt) for prompt in prompts))
    compare("16 at once", prompts, expected, together)


async def generate(pipeline: Pipeline, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of one greedy completion, as ids."""
    answer = await pipeline.complete(prompt, max_tokens=max_tokens, return_token_ids=True)
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def compare(how: str, prompts: list[list[int]], expected: list[list[int]], got: list[list[int]]) -> None:
    wrong = [
        f"prompt {number} ({len(prompt)} tokens): expected {want}, got {have}"
        for number, (prompt, want, have) in enumerate(zip(prompts, expected, got, strict=True))
        if want != have
    ]
    assert not wrong, f"{how}: {len(wrong)} of {len(prompts)} differ\n" + "\n".join(wrong[:5])
