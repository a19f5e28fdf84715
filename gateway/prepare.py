"""An `Ask` becomes prompts of token ids that fit the context, each with its final sampling parameters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from gateway.errors import GatewayError
from gateway.parsing import Ask
from gateway.tokenizer import TextTokenizer
from pdq.wire.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One choice's input: token ids, their text (for echo), and how to go on after them."""

    token_ids: list[int]
    text: str | None
    sampling: SamplingParams


async def prepare(ask: Ask, tokenizer: TextTokenizer, max_model_len: int) -> list[Prompt]:
    """Raises GatewayError: an empty prompt, a token id that the model hasn't, or too many tokens."""
    prompts = []
    if ask.kind == "chat":
        text = tokenizer.render(
            ask.messages, add_generation_prompt=ask.add_generation_prompt, extra=ask.template_kwargs
        )
        token_ids = await tokenizer.encode(text, add_special_tokens=False)  # the template wrote them already
        prompts.append(_prompt(ask, token_ids, None, max_model_len))
    for index, given in enumerate(ask.prompts):
        param = f"prompt[{index}]" if ask.is_list else "prompt"
        if isinstance(given, str):
            token_ids = await tokenizer.encode(given, add_special_tokens=ask.add_special_tokens)
            prompts.append(_prompt(ask, token_ids, given, max_model_len, param))
        else:
            unknown = next((token_id for token_id in given if token_id >= tokenizer.vocab_size), None)
            if unknown is not None:
                message = f"token id {unknown} is not in the vocabulary of {tokenizer.vocab_size}"
                raise GatewayError("invalid_value", message, param=param)
            prompts.append(_prompt(ask, given, None, max_model_len, param))
    return prompts


def _prompt(ask: Ask, token_ids: list[int], text: str | None, max_model_len: int, param: str = "messages") -> Prompt:
    num_tokens = len(token_ids)
    if not num_tokens:
        raise GatewayError("invalid_value", "the prompt has no tokens", param=param)
    room = max_model_len - num_tokens
    max_tokens = room if ask.max_tokens is None else max(ask.max_tokens, 1)  # 0: one is generated and thrown away
    if room < max(max_tokens, 1):
        raise GatewayError("context_length_exceeded", _too_long(ask, num_tokens, max_model_len), param=param)
    if ask.sampling.min_tokens > max_tokens:
        message = f"min_tokens ({ask.sampling.min_tokens}) is more than {ask.max_tokens_field} ({max_tokens})"
        raise GatewayError("invalid_value", message, param="min_tokens")
    return Prompt(token_ids=token_ids, text=text, sampling=dataclasses.replace(ask.sampling, max_tokens=max_tokens))


def _too_long(ask: Ask, num_tokens: int, max_model_len: int) -> str:
    limit = f"This model's maximum context length is {max_model_len} tokens."
    if ask.max_tokens is None:
        return f"{limit} However, your prompt has {num_tokens} tokens, which leaves no room for an answer."
    return (
        f"{limit} However, you requested {num_tokens + ask.max_tokens} tokens "
        f"({num_tokens} in the prompt, {ask.max_tokens} in the completion)."
    )
