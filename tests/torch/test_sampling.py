"""What is drawn from given logits, compared with transformers' processors and with the definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from engine.embedded.runner import TokenSequence
from engine.embedded.sampling import Sampler, seeded, warpers
from pdq.wire.types import SamplingParams

VOCAB = 50


def sequence(prompt: list[int], generated: list[int] | None = None, **sampling: object) -> TokenSequence:
    return TokenSequence(
        engine_request_id="r",
        token_ids=prompt + (generated or []),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=100, **sampling),
    )


def some_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * 3


def draws(logits: torch.Tensor, count: int, **sampling: object) -> torch.Tensor:
    """How often each token is chosen over `count` seeds."""
    sampler = Sampler([])
    chosen = [sampler.choose([sequence([1], seed=seed, **sampling)], logits)[0] for seed in range(count)]
    return torch.bincount(torch.tensor(chosen), minlength=VOCAB) / count


def test_greedy_requests_get_the_most_likely_token_of_their_row():
    logits = some_logits(3)

    chosen = Sampler([]).choose([sequence([1], temperature=0.0)] * 3, logits)

    assert chosen == logits.argmax(-1).tolist()


def test_greedy_and_sampled_requests_share_a_batch_without_touching_each_other():
    logits = some_logits(4)
    kept = logits.clone()
    sampled = {"temperature": 0.7, "seed": 3}
    rows = [sequence([1], temperature=0.0), sequence([1], **sampled), sequence([1], temperature=0.0, min_tokens=5)]
    rows.append(sequence([1, 2], [3, 3], temperature=0.0, frequency_penalty=1.0))

    together = Sampler([2]).choose(rows, logits)

    alone = [Sampler([2]).choose([row], logits[i : i + 1])[0] for i, row in enumerate(rows)]
    assert together == alone
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {}])
def test_tokens_are_drawn_with_the_probabilities_that_the_filters_leave(sampling):
    logits = some_logits()

    found = draws(logits, 3000, **sampling)

    scores = logits
    for warper in warpers(SamplingParams(max_tokens=1, **sampling)):
        scores = warper(torch.empty((1, 0), dtype=torch.long), scores)
    expected = scores.softmax(-1)[0]
    assert not found[expected == 0].any()
    assert (found - expected).abs().max() < 0.035  # 3.5 standard deviations of the most uncertain token


def test_filters_apply_in_vllm_order():
    everything = SamplingParams(max_tokens=1, temperature=0.5, min_p=0.1, top_k=3, top_p=0.5)

    names = [type(warper).__name__ for warper in warpers(everything)]

    assert names == ["TemperatureLogitsWarper", "MinPLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]


@given(seed=st.integers(-(2**63), 2**63), top_p=st.floats(0.01, 0.99), row=st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_top_p_keeps_the_smallest_set_that_reaches_p(seed, top_p, row):
    logits = some_logits(seed=row)

    (chosen,) = Sampler([]).choose([sequence([1], seed=seed, top_p=top_p)], logits)

    probabilities = logits.softmax(-1)[0]
    likelier = probabilities[probabilities > probabilities[chosen]].sum()
    assert likelier < top_p + 1e-6


@given(seed=st.integers(0, 2**63), top_k=st.integers(1, 60), row=st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_top_k_keeps_the_k_best(seed, top_k, row):
    logits = some_logits(seed=row)

    (chosen,) = Sampler([]).choose([sequence([1], seed=seed, top_k=top_k)], logits)

    assert chosen in logits[0].topk(min(top_k, VOCAB)).indices


def test_repetition_penalty_is_transformers_over_prompt_and_generated_tokens():
    logits = some_logits()
    best = int(logits.argmax())

    for prompt, generated in (([best], []), ([1], [best])):
        row = sequence(prompt, generated, temperature=0.0, repetition_penalty=1.8)
        (chosen,) = Sampler([]).choose([row], logits)

        expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([prompt + generated]), logits)
        assert chosen == int(expected.argmax())


def test_frequency_penalty_counts_and_presence_penalty_does_not():
    logits = torch.zeros((1, VOCAB))
    logits[0, 7], logits[0, 8], logits[0, 9] = 5.0, 4.5, 3.9

    def best(generated: list[int], **penalties: float) -> int:
        return Sampler([]).choose([sequence([7], generated, temperature=0.0, **penalties)], logits)[0]

    assert best([], frequency_penalty=1.0) == 7  # the prompt doesn't count
    assert best([7], presence_penalty=0.4) == 7
    assert best([7, 7, 7], presence_penalty=0.4) == 7
    assert best([7, 7, 7], frequency_penalty=0.4) == 8
    assert best([7, 7, 7, 8, 8], frequency_penalty=0.4) == 9
    assert best([9], frequency_penalty=-2.0) == 9


def test_min_tokens_forbids_the_end_until_enough_were_generated():
    logits = torch.zeros((1, VOCAB))
    logits[0, 2], logits[0, 30], logits[0, 31] = 9.0, 8.0, 7.0
    sampler = Sampler([2])

    def best(num_generated: int, **sampling: object) -> int:
        row = sequence([1], [5] * num_generated, temperature=0.0, min_tokens=3, **sampling)
        return sampler.choose([row], logits)[0]

    assert best(2) == 30
    assert best(2, stop_token_ids=(30, 10**6)) == 31
    assert best(2, ignore_eos=True) == 2
    assert best(3) == 2


def test_a_seeded_request_draws_the_same_wherever_it_is_continued():
    logits = some_logits(12, seed=4)

    def run(sampler: Sampler, row: TokenSequence, steps: int) -> list[int]:
        for _ in range(steps):
            index = len(row.token_ids) - 2
            row.token_ids += sampler.choose([row], logits[index : index + 1])
        return row.token_ids[2:]

    whole = run(Sampler([]), sequence([1, 2], seed=11), 12)
    first = run(Sampler([]), sequence([1, 2], seed=11), 5)
    rest = run(Sampler([]), sequence([1, 2], first, seed=11), 7)

    assert rest == whole
    assert run(Sampler([]), sequence([1, 2], seed=12), 12) != whole


def test_requests_without_a_seed_differ():
    flat = torch.zeros((1, VOCAB))

    runs = {tuple(Sampler([]).choose([sequence([1])], flat)[0] for _ in range(1)) for _ in range(40)}

    assert len(runs) > 5


def test_any_integer_is_a_seed():
    for seed in (0, -1, 2**63, 2**200):
        assert torch.equal(torch.rand(2, generator=seeded(seed, 1)), torch.rand(2, generator=seeded(seed, 1)))


def test_a_vanishing_temperature_is_greedy():
    logits = some_logits()

    assert Sampler([]).choose([sequence([1], temperature=1e-30)], logits) == [int(logits.argmax())]
