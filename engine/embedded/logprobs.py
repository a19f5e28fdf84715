"""Log probabilities for answers. Loads torch: import it lazily.

They are of the model's own distribution (log-softmax of the raw logits), before penalties, temperature and filters:
vLLM's default. `exp` of a chosen token's value is therefore not the chance with which it was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from engine.embedded.runner import Chunk
from pdq.wire.types import TokenLogprob

_ROWS_AT_ONCE: Final = 128
"""Bounds the copies that top-k and log-sum-exp make: 25 MB at 49,152 tokens of vocabulary."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_alternatives: int) -> list[TokenLogprob]:
    """One entry per row of `logits` for the token of the same index, with the best alternatives (0: none)."""
    found: list[TokenLogprob] = []
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        ids = token_ids[first : first + _ROWS_AT_ONCE]
        found += _some_logprobs(logits[first : first + len(ids)].float(), ids, num_alternatives)
    return found


def num_prompt_rows(chunk: Chunk) -> int:
    """How many of the chunk's first logits predict a prompt token (whose value is wanted)."""
    sequence = chunk.sequence
    if sequence.sampling.prompt_logprobs is None:
        return 0
    last = min(sequence.num_computed + chunk.num_tokens, sequence.num_prompt_tokens - 1)
    return max(0, last - sequence.num_computed)


def _some_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_alternatives: int) -> list[TokenLogprob]:
    total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (logits.gather(1, torch.tensor(token_ids).unsqueeze(1)) - total).squeeze(1).tolist()
    if num_alternatives == 0:
        return [TokenLogprob(token_id=i, logprob=value) for i, value in zip(token_ids, chosen, strict=True)]
    best, best_ids = logits.topk(min(num_alternatives, logits.shape[-1]), dim=-1)
    return [
        TokenLogprob(token_id=i, logprob=value, top_ids=tuple(ids), top_logprobs=tuple(values))
        for i, value, ids, values in zip(token_ids, chosen, best_ids.tolist(), (best - total).tolist(), strict=True)
    ]
