"""vLLM's arrays of log probabilities as TokenLogprobs. Pure; arrays are anything with `tolist()`."""

from __future__ import annotations

from typing import Any

from pdq.wire.types import TokenLogprob


def token_logprobs(lists: Any, num_alternatives: int) -> tuple[TokenLogprob, ...]:
    """Of vLLM's (token ids, log probabilities, ranks, ...), each one row per position.

    Column 0 is the token that was chosen, or that the prompt has there; the most likely ones follow, best first, as
    many as the request of the batch that wants most.
    """
    last = 1 + num_alternatives
    return tuple(
        TokenLogprob(token_id=ids[0], logprob=values[0], top_ids=tuple(ids[1:last]), top_logprobs=tuple(values[1:last]))
        for ids, values in zip(lists[0].tolist(), lists[1].tolist(), strict=True)
    )
