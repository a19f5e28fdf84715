"""Text to token ids and back: a model's tokenizer.json, or the byte tokenizer of the simulated engine.

A prompt is tokenised here and nowhere else. Long ones go through `encode_batch` in a thread: `encode` would hold the
interpreter for hundreds of milliseconds, `encode_batch` lets it go.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import jinja2
from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate, load_chat_template
from gateway.detokenise import ByteDecoder, StreamDecoder, TextDecoder
from gateway.errors import GatewayError
from pdq.runtime.errors import StartupError
from pdq.runtime.model import ModelSettings

_SHORT_CHARS: Final = 4096
"""Up to here encoding takes less time than a thread hop is worth (about 1 ms)."""


class TextTokenizer(Protocol):
    vocab_size: int
    max_model_len: int | None
    """What the model's config says; None: it says nothing."""

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, extra: Mapping[str, Any]
    ) -> str:
        """The chat as one text, special tokens included: encode it without adding any."""

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decoder(self, *, skip_special_tokens: bool, context: list[int]) -> TextDecoder: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What this token stands for; a token may be a part of a character."""


class ByteTokenizer:
    """Of the simulated engine: ids 0-255 are bytes, 256 begins, 257 ends a text (neither is ever added here)."""

    vocab_size = 258
    max_model_len: int | None = None

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, extra: Mapping[str, Any]
    ) -> str:
        return "\n".join(message["content"] for message in messages)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decoder(self, *, skip_special_tokens: bool, context: list[int]) -> TextDecoder:
        return ByteDecoder()

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        decoder = ByteDecoder()
        return decoder.feed(token_ids) + decoder.flush()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


class ModelTokenizer:
    """A `tokenizers` tokenizer with its model's chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, max_model_len: int | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.max_model_len = max_model_len
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._is_byte_level = "ByteLevel" in json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
        self._token_bytes: dict[int, bytes] = {}

    def render(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, extra: Mapping[str, Any]
    ) -> str:
        if self._template is None:
            raise GatewayError("unsupported", "this model has no chat template; use /v1/completions", param="messages")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, extra=extra)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # a lone surrogate is no text for the tokenizer
        if len(text) <= _SHORT_CHARS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return await asyncio.to_thread(self._encode_long, text, add_special_tokens)

    def decoder(self, *, skip_special_tokens: bool, context: list[int]) -> TextDecoder:
        return StreamDecoder(self._tokenizer, skip_special_tokens=skip_special_tokens, context=context)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._find_token_bytes(token_id)
        return known

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _find_token_bytes(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and all(char in _BYTE_LEVEL for char in token):
            return bytes(_BYTE_LEVEL[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


def load_tokenizer(model: ModelSettings) -> TextTokenizer:
    """Of the model's folder, or the simulated engine's. Blocking. Raises StartupError."""
    if model.is_sim:
        return ByteTokenizer()
    return read_tokenizer(model.folder())


def read_tokenizer(folder: Path) -> ModelTokenizer:
    """Blocking. Raises StartupError."""
    path = folder / "tokenizer.json"
    if not path.exists():
        make = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        command = f'python -c "from transformers import AutoTokenizer; {make}"'
        raise StartupError(f"{folder} has no tokenizer.json; make one: {command}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        template = load_chat_template(folder)
        limit = _context_length(folder / "config.json")
    except jinja2.TemplateError as error:
        raise StartupError(f"the chat template in {folder} is broken: {error}") from error
    except Exception as error:  # tokenizers raises plain Exception for a file that it can't read
        raise StartupError(f"can't read the tokenizer in {folder}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return ModelTokenizer(tokenizer, template, limit)


def _context_length(path: Path) -> int | None:
    if not path.exists():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    value = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
    return value if isinstance(value, int) else None


def _byte_level_alphabet() -> dict[str, int]:
    """How byte-level tokenizers write bytes as visible characters: printable ones as themselves, others from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL: Final = _byte_level_alphabet()
