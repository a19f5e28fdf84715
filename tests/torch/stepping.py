"""Drives a runner the way the scheduler does, with chunk sizes of the test's choice."""

from __future__ import annotations

import random

from engine.embedded.runner import Chunk, ChunkResult, Runner, TokenSequence
from pdq.wire.types import SamplingParams


def no_hook(layer: int) -> None:
    return None


class Blocks:
    """A shuffled free list: tables are never accidentally contiguous."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def new_sequence(self, name: str, ids: list[int], sampling: SamplingParams, *, prompt: int | None = None):
        sequence = TokenSequence(
            engine_request_id=name,
            token_ids=list(ids),
            num_prompt_tokens=len(ids) if prompt is None else prompt,
            sampling=sampling,
        )
        self.grow(sequence, len(ids))
        return sequence

    def grow(self, sequence: TokenSequence, num_positions: int) -> None:
        while len(sequence.block_ids) * self.block_size < num_positions:
            sequence.block_ids.append(self._free.pop())

    def free(self, sequence: TokenSequence) -> None:
        self._free += sequence.block_ids
        sequence.block_ids = []


def step(runner: Runner, blocks: Blocks, work: list[tuple[TokenSequence, int]]) -> list[ChunkResult]:
    """Computes `n` tokens of each sequence (all that are left when n is 0) and appends what was sampled."""
    batch = []
    for sequence, num_tokens in work:
        left = len(sequence.token_ids) - sequence.num_computed
        take = min(num_tokens or left, left)
        blocks.grow(sequence, sequence.num_computed + take)
        batch.append(Chunk(sequence, take, take == left))
    results = runner.run(batch, no_hook, no_hook)
    for chunk, result in zip(batch, results, strict=True):
        chunk.sequence.num_computed += chunk.num_tokens
        if result.token_id is not None:
            chunk.sequence.token_ids.append(result.token_id)
    return results


def generate(
    runner: Runner, blocks: Blocks, prompts: list[list[int]], max_tokens: int, *, concurrency: int, rng: random.Random
) -> list[list[int]]:
    """Greedy outputs, up to `concurrency` sequences at once, prompts in chunks of random size, arrivals mixed."""
    waiting = [
        blocks.new_sequence(str(i), prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0))
        for i, prompt in enumerate(prompts)
    ]
    everything, running = list(waiting), []
    while waiting or running:
        while waiting and len(running) < concurrency:
            running.append(waiting.pop(0))
        work = []
        for sequence in running:
            left = len(sequence.token_ids) - sequence.num_computed
            work.append((sequence, left if left == 1 else rng.choice((1, 16, 33, 200, 700))))
        rng.shuffle(work)
        step(runner, blocks, work)
        for sequence in [s for s in running if _ended(s, runner)]:
            running.remove(sequence)
            blocks.free(sequence)
    return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in everything]


def _ended(sequence: TokenSequence, runner: Runner) -> bool:
    generated = sequence.token_ids[sequence.num_prompt_tokens :]
    return bool(generated) and (len(generated) >= sequence.sampling.max_tokens or generated[-1] in runner.eos_token_ids)
