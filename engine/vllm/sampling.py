"""pdq's SamplingParams as the arguments of vLLM's. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from engine.base import EngineRequest, LoadKv, PrefillOnly, PushKv, ReceiveKv
from pdq.wire.types import FormatKind, OutputFormat, num_ids

Kv = PrefillOnly | LoadKv | PushKv | ReceiveKv | None


def is_prefill(kv: Kv) -> bool:
    return isinstance(kv, PrefillOnly | PushKv)


def sampling_arguments(
    request: EngineRequest, *, kv_params: dict[str, Any] | None, eos_token_ids: Iterable[int]
) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams. Raises ValueError when nothing is left to generate.

    Generated ids go to vLLM as part of the prompt. `max_tokens` and `min_tokens` are what is left of them; what vLLM
    counts over the output alone (presence and frequency penalty) starts anew, and so does a seed's sequence.
    """
    extra = {"extra_args": {"kv_transfer_params": kv_params}} if kv_params else {}
    sampling = request.sampling
    if is_prefill(request.kv):
        # One token, which nobody sees. It ends by length whatever it is: an EOS must not end it otherwise.
        return {
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "prompt_logprobs": sampling.prompt_logprobs,
            "detokenize": False,
            **extra,
        }
    num_generated = num_ids(request.generated_ids)
    if num_generated >= sampling.max_tokens:
        raise ValueError(f"{num_generated} tokens are generated already and max_tokens is {sampling.max_tokens}")
    stop_token_ids = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stop_token_ids.update(eos_token_ids)
    max_tokens = sampling.max_tokens - num_generated
    return {
        "max_tokens": max_tokens,
        "min_tokens": min(max(0, sampling.min_tokens - num_generated), max_tokens),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": sampling.seed,
        "logprobs": sampling.logprobs,
        # D never sees the prompt's logits; P has reported them.
        "prompt_logprobs": sampling.prompt_logprobs if request.kv is None else None,
        "stop_token_ids": sorted(stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "structured_outputs": structured_outputs(sampling.output_format),
        "detokenize": False,
        **extra,
    }


def structured_outputs(wanted: OutputFormat | None) -> dict[str, Any] | None:
    """Keyword arguments of vllm.StructuredOutputsParams."""
    if wanted is None:
        return None
    value: object = wanted.text
    if wanted.kind is FormatKind.JSON_OBJECT:
        value = True
    elif wanted.kind is FormatKind.CHOICE:
        value = json.loads(wanted.text)
    return {wanted.kind.value: value}
