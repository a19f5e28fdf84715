"""Chooses tokens from logits: penalties, temperature, filters, seeds. Loads torch and transformers: import it lazily.

Order, as in vLLM: min_tokens mask, repetition, frequency and presence penalty, temperature, min-p, top-k, top-p.
The repetition penalty looks at the prompt and all generated tokens; frequency and presence penalty, as OpenAI
defines them, at generated tokens only, those from before a migration included.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.embedded.runner import TokenSequence
from pdq.wire.types import SamplingParams

_LEAST_TEMPERATURE: Final = 1e-4
"""Below it logits / temperature leaves float32's range; the choice is greedy there anyway."""


class Sampler:
    """Keeps no state per request: what a seeded request draws depends on its seed and the index of the token."""

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._unseeded = torch.Generator().manual_seed(secrets.randbits(63))

    def choose(self, sequences: Sequence[TokenSequence], logits: torch.Tensor) -> list[int]:
        """One token id per sequence from its row of float32 `logits` `[sequences, vocabulary]`, which is kept."""
        chosen: list[int] = logits.argmax(dim=-1).tolist()
        for row, sequence in enumerate(sequences):
            if not _is_plain_greedy(sequence):
                chosen[row] = self._choose_one(sequence, logits[row : row + 1].clone())
        return chosen

    def _choose_one(self, sequence: TokenSequence, scores: torch.Tensor) -> int:
        sampling = sequence.sampling
        num_generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        if num_generated < sampling.min_tokens:
            scores[:, [token for token in self._ending(sampling) if token < scores.shape[-1]]] = -torch.inf
        scores = _penalise(sequence, scores)
        if sampling.is_greedy:
            return int(scores.argmax())
        ids = torch.empty((1, 0), dtype=torch.long)  # the warpers don't look at them
        for warper in warpers(sampling):
            scores = warper(ids, scores)
        generator = self._unseeded if sampling.seed is None else seeded(sampling.seed, num_generated)
        return int(torch.multinomial(scores.softmax(dim=-1), 1, generator=generator))

    def _ending(self, sampling: SamplingParams) -> set[int]:
        return set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self._eos_token_ids)


def seeded(seed: int, token_index: int) -> torch.Generator:
    """The generator for one token of a seeded request: a migrated request goes on with the same draws."""
    mixed = hashlib.blake2b(f"{seed}:{token_index}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed, "little") >> 1)


def warpers(sampling: SamplingParams) -> list[LogitsProcessor]:
    """transformers' processors for temperature and filters, those that are on, in order."""
    found: list[LogitsProcessor] = []
    if sampling.temperature != 1.0:
        found.append(TemperatureLogitsWarper(max(float(sampling.temperature), _LEAST_TEMPERATURE)))
    if sampling.min_p > 0.0:
        found.append(MinPLogitsWarper(float(sampling.min_p)))
    if sampling.top_k is not None and sampling.top_k > 0:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(TopPLogitsWarper(float(sampling.top_p)))
    return found


def _is_plain_greedy(sequence: TokenSequence) -> bool:
    sampling = sequence.sampling
    return (
        sampling.is_greedy
        and sampling.repetition_penalty == 1.0
        and sampling.frequency_penalty == 0.0
        and sampling.presence_penalty == 0.0
        and len(sequence.token_ids) - sequence.num_prompt_tokens >= sampling.min_tokens
    )


def _penalise(sequence: TokenSequence, scores: torch.Tensor) -> torch.Tensor:
    sampling = sequence.sampling
    if sampling.repetition_penalty != 1.0:
        ids = torch.tensor([sequence.token_ids])
        scores = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))(ids, scores)
    generated = sequence.token_ids[sequence.num_prompt_tokens :]
    if generated and (sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0):
        ids, counts = torch.tensor(generated).unique(return_counts=True)
        scores[0, ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return scores
