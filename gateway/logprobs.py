"""Log probabilities in the shapes of the OpenAI API (chat, completions) and of vLLM (`prompt_logprobs`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gateway.tokenizer import TextTokenizer
from pdq.wire.types import TokenLogprob

_LOWEST: Final = -9999.0
"""JSON has no minus infinity; OpenAI and vLLM write this."""


def chat_logprobs(tokenizer: TextTokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": [_chat_entry(tokenizer, entry) for entry in entries], "refusal": None}


def completion_logprobs(
    tokenizer: TextTokenizer, entries: Sequence[tuple[int, TokenLogprob | None]], offset: int
) -> dict[str, Any]:
    """`entries`: token id and its logprob, None for the first prompt token. `offset`: characters before the first."""
    tokens: list[str] = []
    offsets: list[int] = []
    for token_id, _ in entries:
        tokens.append(_text(tokenizer, token_id))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for _, entry in entries],
        "top_logprobs": [None if entry is None else _top(tokenizer, entry) for _, entry in entries],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: TextTokenizer, positions: Sequence[TokenLogprob | None]
) -> list[dict[str, dict[str, Any]] | None]:
    """Per position: token id -> logprob, rank and text of the given token and of the most likely ones."""
    return [None if entry is None else _position(tokenizer, entry) for entry in positions]


def _position(tokenizer: TextTokenizer, entry: TokenLogprob) -> dict[str, dict[str, Any]]:
    ranks = {token_id: rank for rank, token_id in enumerate(entry.top_ids, 1)}
    logprobs = {entry.token_id: entry.logprob} | dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": _text(tokenizer, token_id),
        }
        for token_id, logprob in logprobs.items()
    }


def _chat_entry(tokenizer: TextTokenizer, entry: TokenLogprob) -> dict[str, Any]:
    top = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {
        **_chat_token(tokenizer, entry.token_id, entry.logprob),
        "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in top],
    }


def _chat_token(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _top(tokenizer: TextTokenizer, entry: TokenLogprob) -> dict[str, float]:
    """By text, as OpenAI has it; of tokens with the same text the most likely one stays. The chosen one is in."""
    top: dict[str, float] = {}
    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        top.setdefault(_text(tokenizer, token_id), _finite(logprob))
    top.setdefault(_text(tokenizer, entry.token_id), _finite(entry.logprob))
    return top


def _text(tokenizer: TextTokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
