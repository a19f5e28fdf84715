"""An EngineRequest from outside, checked and turned into what the scheduler works with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.base import EngineRequest, LoadKv, PrefillOnly, PushKv, ReceiveKv
from engine.embedded.request import Request
from engine.embedded.runner import Chunk, TokenSequence
from pdq.wire.types import SamplingParams, unpack_ids


class Refused(Exception):
    """The engine can't ever serve this request; the text has the numbers."""

    def __init__(self, detail: str, *, code: str = "engine_error") -> None:
        super().__init__(f"{code}: {detail}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What every request must fit."""

    max_model_len: int
    vocab_size: int


def new_request(request: EngineRequest, limits: Limits, *, arrival: int) -> Request:
    """Raises Refused."""
    prompt_ids = unpack_ids(request.prompt_ids)
    generated_ids = unpack_ids(request.generated_ids)
    token_ids = prompt_ids + generated_ids
    is_prefill_only = isinstance(request.kv, PrefillOnly | PushKv)
    if not prompt_ids:
        raise Refused("the prompt is empty")
    if max(token_ids) >= limits.vocab_size:
        raise Refused(f"token id {max(token_ids)} is outside the vocabulary of {limits.vocab_size}")
    if request.sampling.output_format is not None and not is_prefill_only:
        raise Refused("the embedded engine knows no output formats", code="unsupported")
    room = limits.max_model_len - len(token_ids) + is_prefill_only  # a prefill's discarded token takes no place
    if room < 1:
        raise Refused(
            f"{len(token_ids)} tokens leave no room to generate: this engine's limit is {limits.max_model_len}"
        )
    sampling = _sampling(request, len(generated_ids))
    if len(generated_ids) >= sampling.max_tokens:
        raise Refused(f"{len(generated_ids)} tokens are generated already and max_tokens is {sampling.max_tokens}")
    sequence = TokenSequence(
        engine_request_id=request.engine_request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(prompt_ids),
        sampling=sampling,
    )
    return Request(
        sequence=sequence,
        decode_chunk=Chunk(sequence, 1, True),
        arrival=arrival,
        is_prefill_only=is_prefill_only,
        max_tokens=min(sampling.max_tokens, limits.max_model_len - len(prompt_ids) + is_prefill_only),
        reads_prefix_cache=sampling.prompt_logprobs is None,
        prompt_logprobs=None if sampling.prompt_logprobs is None else [None],
    )


def _sampling(request: EngineRequest, num_generated: int) -> SamplingParams:
    """P samples one token and nobody sees it; D never sees the prompt's logits."""
    if isinstance(request.kv, PrefillOnly | PushKv):
        return replace(request.sampling, max_tokens=num_generated + 1, min_tokens=0, logprobs=None)
    if isinstance(request.kv, LoadKv | ReceiveKv) and request.sampling.prompt_logprobs is not None:
        return replace(request.sampling, prompt_logprobs=None)
    return request.sampling
