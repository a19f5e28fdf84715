"""The demo model through the runner gives transformers' own greedy tokens, alone and in batches of 16."""

from __future__ import annotations

import random

import pytest

from tests.torch.parity import parity_prompts, reference_generate
from tests.torch.stepping import Blocks, generate

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("num_prompts", "max_tokens", "long_tokens"), [(16, 6, 1000), pytest.param(24, 12, 3000, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("concurrency", [1, 16])
def test_greedy_tokens_equal_transformers_generate(
    concurrency, num_prompts, max_tokens, long_tokens, model_dir, make_runner
):
    prompts = parity_prompts(model_dir, num_prompts, long_tokens=long_tokens)
    expected = reference_generate(model_dir, prompts, max_tokens)
    runner = make_runner(model_dir, num_blocks=800, block_size=16)

    blocks = Blocks(800, 16, seed=concurrency)
    found = generate(runner, blocks, prompts, max_tokens, concurrency=concurrency, rng=random.Random(concurrency))

    assert found == expected


def test_the_prompts_cover_what_parity_is_about(model_dir):
    prompts = parity_prompts(model_dir, 24)

    assert [len(prompt) for prompt in prompts[:5]] == [1, 15, 16, 17, 3000]
    assert prompts[5][:150] == prompts[6][:150]
    assert prompts[5] != prompts[6]
    assert prompts[7] == prompts[8]
    assert len(prompts) == 24
