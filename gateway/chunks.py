"""Chunks of a streamed answer, as SSE events. A plain token costs a fixed prefix, its encoded text and a fixed suffix.

Each event is one JSON document in one `data:` line: every control character and line separator is escaped.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Any, Final, Protocol

from gateway.choice import Choice

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"


def event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


class ChunkWriter(Protocol):
    """Of one HTTP answer; `index` is the choice."""

    def opening(self, index: int) -> bytes:
        """What comes before the choice's first text."""

    def text(self, index: int, text: str) -> bytes: ...

    def rich(self, index: int, text: str, **fields: Any) -> bytes:
        """Text with more fields in its choice (`logprobs`, `token_ids`)."""

    def finish(self, index: int, choice: Choice, text: str, **fields: Any) -> bytes: ...

    def usage(self, usage: dict[str, Any], **fields: Any) -> bytes:
        """The last chunk: no choices. `fields` are put beside `usage`."""


class _Base:
    _object: str

    def __init__(self, *, answer_id: str, created: int, model: str, has_usage: bool) -> None:
        """`has_usage`: as OpenAI has it, every chunk then says `usage: null` but the last one."""
        self._head = {"id": answer_id, "object": self._object, "created": created, "model": model}
        self._usage: dict[str, Any] = {"usage": None} if has_usage else {}
        head = json.dumps(self._head, separators=(",", ":"))[:-1]
        self._prefix = f'data: {head},"choices":[{{"index":'
        tail = ',"usage":null}\n\n' if has_usage else "}\n\n"
        self._suffix = f',"logprobs":null,"finish_reason":null}}]{tail}'

    def usage(self, usage: dict[str, Any], **fields: Any) -> bytes:
        return event({**self._head, "choices": [], "usage": usage, **fields})

    def _chunk(self, index: int, content: dict[str, Any], finish: str | None, **fields: Any) -> bytes:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish, **fields}
        return event({**self._head, "choices": [choice], **self._usage})


class ChatChunks(_Base):
    _object = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def text(self, index: int, text: str) -> bytes:
        content = encode_basestring_ascii(text)
        return f'{self._prefix}{index},"delta":{{"content":{content}}}{self._suffix}'.encode()

    def rich(self, index: int, text: str, **fields: Any) -> bytes:
        return self._chunk(index, {"delta": {"content": text}}, None, **fields)

    def finish(self, index: int, choice: Choice, text: str, **fields: Any) -> bytes:
        delta = {"content": text} if text else {}
        return self._chunk(index, {"delta": delta}, choice.finish_reason, stop_reason=choice.stop_reason, **fields)


class CompletionChunks(_Base):
    _object = "text_completion"

    def opening(self, index: int) -> bytes:
        return b""

    def text(self, index: int, text: str) -> bytes:
        return f'{self._prefix}{index},"text":{encode_basestring_ascii(text)}{self._suffix}'.encode()

    def rich(self, index: int, text: str, **fields: Any) -> bytes:
        return self._chunk(index, {"text": text}, None, **fields)

    def finish(self, index: int, choice: Choice, text: str, **fields: Any) -> bytes:
        return self._chunk(index, {"text": text}, choice.finish_reason, stop_reason=choice.stop_reason, **fields)
