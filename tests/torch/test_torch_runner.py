"""The runner on tiny random models: same tokens as `generate`, KV where the region says it is, hooks in order."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.embedded.runner import Chunk, RunnerError
from pdq.wire.types import Capability, SamplingParams
from tests.torch.stepping import Blocks, generate, no_hook, step
from tests.torch.tiny import save_tiny_model

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, 3, 4, 5, 40, *(rng.randrange(1, 30) for _ in range(count))][:count]
    return [[rng.randrange(127) for _ in range(length)] for length in lengths]


def reference(folder, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
        found.append(output[0, len(prompt) :].tolist())
    return found


def logits_of(folder, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_tokens_are_those_of_generate_at_any_batch_composition(kind, tmp_path, make_runner):
    overrides = {"sliding_window": None} if kind == "mistral" else {}
    folder = save_tiny_model(tmp_path, kind, **overrides)
    prompts = random_prompts(14)
    expected = reference(folder, prompts, 8)
    runner = make_runner(folder, num_blocks=200)

    for concurrency in (1, 5, 14):
        blocks = Blocks(200, 4, seed=concurrency)
        found = generate(runner, blocks, prompts, 8, concurrency=concurrency, rng=random.Random(concurrency))
        assert found == expected


def test_kv_bytes_copied_to_other_blocks_of_another_runner_continue_the_request(tiny_dir, make_runner):
    producer, consumer = make_runner(tiny_dir), make_runner(tiny_dir)
    (prompt,) = random_prompts(5)[4:]
    (expected,) = reference(tiny_dir, [prompt], 8)
    there, here = Blocks(64, 4, seed=1), Blocks(64, 4, seed=2)
    at_p = there.new_sequence("p", prompt, GREEDY)
    step(producer, there, [(at_p, 0)])

    at_d = here.new_sequence("d", prompt, GREEDY)
    (source,), (target,) = producer.regions, consumer.regions
    for remote, local in zip(at_p.block_ids, at_d.block_ids, strict=False):
        ctypes.memmove(
            target.base_address + local * target.block_stride_bytes,
            source.base_address + remote * source.block_stride_bytes,
            source.size_bytes,
        )
    at_d.num_computed = len(prompt) - 1
    while len(at_d.token_ids) < len(prompt) + len(expected):
        step(consumer, here, [(at_d, 1)])

    assert at_d.token_ids[len(prompt) :] == expected
    assert consumer.fingerprint() == producer.fingerprint()


def test_a_region_spans_exactly_the_memory_of_its_blocks(tiny_dir, make_runner):
    runner = make_runner(tiny_dir, num_blocks=10, block_size=4)

    (region,) = runner.regions

    per_token = 3 * 2 * 2 * 16 * 4  # layers, k and v, kv heads, head size, float32
    assert region.block_stride_bytes == runner.block_bytes(4) == 4 * per_token
    assert region.num_blocks == 10


def test_hooks_come_once_per_layer_and_in_order(tiny_dir, make_runner):
    runner, blocks, seen = make_runner(tiny_dir), Blocks(64, 4), []
    one, two = (blocks.new_sequence(str(i), prompt, GREEDY) for i, prompt in enumerate(random_prompts(2)))

    runner.run(
        [Chunk(one, 1, True), Chunk(two, 2, False)],
        lambda layer: seen.append(("before", layer)),
        lambda layer: seen.append(("after", layer)),
    )

    assert seen == [(when, layer) for layer in range(3) for when in ("before", "after")]


def test_a_layer_s_kv_is_final_when_its_after_hook_is_called(tiny_dir, make_runner):
    runner, blocks = make_runner(tiny_dir, num_blocks=8), Blocks(8, 4)
    sequence = blocks.new_sequence("r", random_prompts(4)[3], GREEDY)
    (region,) = runner.regions
    whole_layer = region.block_stride_bytes // 3
    at_hook = {}

    def layer_bytes(layer: int) -> list[bytes]:
        starts = (region.base_address + b * region.block_stride_bytes + layer * whole_layer for b in sequence.block_ids)
        return [ctypes.string_at(start, whole_layer) for start in starts]

    runner.run([Chunk(sequence, 5, True)], no_hook, lambda layer: at_hook.update({layer: layer_bytes(layer)}))

    for layer in range(3):
        assert any(at_hook[layer][0])
        assert at_hook[layer] == layer_bytes(layer)


def test_logprobs_are_of_the_raw_distribution(tiny_dir, make_runner):
    runner, blocks = make_runner(tiny_dir), Blocks(64, 4)
    (prompt,) = random_prompts(5)[4:]
    params = SamplingParams(max_tokens=1, temperature=0.0, repetition_penalty=1.5, logprobs=3)
    sequence = blocks.new_sequence("r", prompt, params)

    (result,) = step(runner, blocks, [(sequence, 0)])

    expected = logits_of(tiny_dir, prompt)[-1].log_softmax(-1)
    assert result.logprob.token_id == result.token_id
    assert result.logprob.logprob == pytest.approx(expected[result.token_id].item(), abs=1e-4)
    assert list(result.logprob.top_ids) == expected.topk(3).indices.tolist()
    assert list(result.logprob.top_logprobs) == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)


def test_no_alternatives_were_asked_for_and_none_are_given(tiny_dir, make_runner):
    runner, blocks = make_runner(tiny_dir), Blocks(64, 4)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)

    (result,) = step(runner, blocks, [(blocks.new_sequence("r", [1, 2, 3], params), 0)])

    assert result.logprob.top_ids == ()


@pytest.mark.parametrize("chunk", [1, 7, 39, 40, 64])
def test_prompt_logprobs_cover_each_position_once_however_the_prompt_is_cut(chunk, tiny_dir, make_runner):
    runner, blocks = make_runner(tiny_dir), Blocks(64, 4)
    (prompt,) = random_prompts(5)[4:]
    wanted = blocks.new_sequence("r", prompt, SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=2))
    other = blocks.new_sequence("other", prompt[:9], GREEDY)

    found = []
    while len(wanted.token_ids) < len(prompt) + 2:  # also decodes: they add nothing
        result, _ = step(runner, blocks, [(wanted, chunk), (other, 3)])
        found += result.prompt_logprobs

    expected = logits_of(tiny_dir, prompt).log_softmax(-1)
    assert [entry.token_id for entry in found] == prompt[1:]
    for position, entry in enumerate(found):
        assert entry.logprob == pytest.approx(expected[position, prompt[position + 1]].item(), abs=1e-4)
        assert list(entry.top_ids) == expected[position].topk(2).indices.tolist()


def test_a_step_without_samples_gives_no_tokens(tiny_dir, make_runner):
    runner, blocks = make_runner(tiny_dir), Blocks(64, 4)
    sequence = blocks.new_sequence("r", [1, 2, 3, 4, 5], GREEDY)

    (result,) = runner.run([Chunk(sequence, 3, False)], no_hook, no_hook)

    assert result.token_id is None
    assert runner.run([], no_hook, no_hook) == []


def test_facts_come_from_the_model_s_configuration(tiny_dir, make_runner):
    runner = make_runner(tiny_dir)

    assert runner.eos_token_ids == {127}
    assert runner.max_model_len == 512
    assert runner.vocab_size == 128
    assert runner.num_layers == 3
    assert Capability.RESUME_EXACT in runner.capabilities
    assert make_runner(tiny_dir, max_model_len=100).max_model_len == 100


def test_another_model_has_another_fingerprint(tmp_path, tiny_dir, make_runner):
    other = save_tiny_model(tmp_path, initializer_range=0.2)

    assert make_runner(other).fingerprint() != make_runner(tiny_dir).fingerprint()


def test_bfloat16_halves_the_kv_and_does_not_promise_exact_resumption(tiny_dir, make_runner):
    runner, blocks = make_runner(tiny_dir, dtype="bfloat16"), Blocks(64, 4)

    found = generate(runner, blocks, random_prompts(6), 4, concurrency=6, rng=random.Random(1))

    assert all(found)
    assert Capability.RESUME_EXACT not in runner.capabilities
    assert runner.block_bytes(4) * 2 == make_runner(tiny_dir).block_bytes(4)


def test_models_with_another_kind_of_attention_are_refused(tmp_path, make_runner):
    folder = save_tiny_model(tmp_path, "mistral", sliding_window=8)

    with pytest.raises(RunnerError, match="sliding"):
        make_runner(folder)


def test_more_positions_than_the_model_has_are_refused_with_both_numbers(tiny_dir, make_runner):
    with pytest.raises(RunnerError, match=r"1000.*512"):
        make_runner(tiny_dir, max_model_len=1000)


def test_a_folder_without_a_model_is_refused(tmp_path, make_runner):
    with pytest.raises(RunnerError, match="can't read the model"):
        make_runner(tmp_path)
