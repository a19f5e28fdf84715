"""Builds a Hugging Face tokenizer.json (byte-level BPE) and its chat template from GGUF metadata.

The format is plain JSON, so nothing but the standard library is needed. GGUF names the pre-tokenizer instead of
describing it; the table below says what each known name means.
"""

from __future__ import annotations

import json
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from engine.models.errors import ModelError

_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}

_PRE_TOKENIZERS: Final[dict[str, dict[str, Any]]] = {
    # digits one by one, then GPT-2's words
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]},
    "gpt-2": _BYTE_LEVEL,
}


class _TokenType(IntEnum):
    """GGUF's `tokenizer.ggml.token_type`; all others are ordinary pieces of text."""

    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json. Raises ModelError for an unknown kind of tokenizer."""
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"can't convert a tokenizer of kind {kind!r} with pre-tokenizer {pre!r}; "
            f"known: 'gpt2' with {', '.join(map(repr, _PRE_TOKENIZERS))}. Use a Hugging Face folder instead."
        )
    files = {"tokenizer.json": _tokenizer(meta, pre), "tokenizer_config.json": _tokenizer_config(meta)}
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer(meta: dict[str, Any], pre: str) -> dict[str, Any]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"]
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_type == _TokenType.CONTROL,
        }
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type in (_TokenType.CONTROL, _TokenType.USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": _bos_prefix(meta, tokens),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def _bos_prefix(meta: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
    """What puts the begin-of-sequence token before every text, where the model wants that."""
    if not meta.get("tokenizer.ggml.add_bos_token"):
        return None
    token_id = int(meta["tokenizer.ggml.bos_token_id"])
    token = tokens[token_id]
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(meta["llama.context_length"]),
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := meta.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{key}_token"] = tokens[int(token_id)]
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
