"""Token ids become text as they come: a character that spans tokens comes out whole, or at the end as U+FFFD.

What `feed` and `flush` return in all is what decoding all ids at once returns.
"""

from __future__ import annotations

import codecs
from typing import Final, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_TAIL: Final = 8
"""Ids of context for the text of incomplete characters at the end."""
_LONGEST_HOLD: Final = 64
"""A text that is replacement characters only would be held back, and decoded again at each step, for ever."""


class TextDecoder(Protocol):
    def feed(self, token_ids: list[int]) -> str:
        """Text that is complete now."""

    def flush(self) -> str:
        """What was held back: incomplete characters as U+FFFD."""


class StreamDecoder:
    """With the `tokenizers` package's DecodeStream. `context`: the ids before, which decide about a space."""

    __slots__ = ("_pending", "_skip", "_stream", "_tail", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._tail = context[-_TAIL:]
        self._pending: list[int] = []
        self._stream = DecodeStream(ids=self._tail, skip_special_tokens=skip_special_tokens)

    def feed(self, token_ids: list[int]) -> str:
        text: str | None = self._stream.step(self._tokenizer, token_ids)
        if text is None:
            self._pending += token_ids
            return self._restart() if len(self._pending) > _LONGEST_HOLD else ""
        self._tail = [*self._tail, *self._pending, *token_ids][-_TAIL:]
        self._pending = []
        return text

    def flush(self) -> str:
        if not self._pending:
            return ""
        before: str = self._tokenizer.decode(self._tail, skip_special_tokens=self._skip)
        whole: str = self._tokenizer.decode(self._tail + self._pending, skip_special_tokens=self._skip)
        self._tail = (self._tail + self._pending)[-_TAIL:]
        self._pending = []
        return whole[len(before) :]

    def _restart(self) -> str:
        text = self.flush()
        self._stream = DecodeStream(ids=self._tail, skip_special_tokens=self._skip)
        return text


class ByteDecoder:
    """Ids below 256 are bytes of UTF-8; others are special and have no text."""

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: list[int]) -> str:
        return self._decoder.decode(bytes([token_id for token_id in token_ids if token_id < 256]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
