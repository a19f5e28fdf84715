"""A ledger of requests: what was asked, what the right answer is, and what the client really got.

The simulated engine echoes its prompt, so the right answer to any greedy request is the prompt's start.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

ANSWER_LIMIT_S = 120.0


@dataclass(slots=True, kw_only=True)
class Line:
    """One request. `status` 0: no HTTP answer; `is_whole`: the answer ended as it should (`[DONE]`, or a document)."""

    prompt: str
    expected: str
    is_stream: bool
    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    request_id: str = ""
    error: Mapping[str, Any] | None = None
    is_whole: bool = False
    is_left: bool = False
    """The client closed the connection on purpose."""
    broken: str = ""
    """What the HTTP client complained of."""
    seconds: float = 0.0
    asked_at: float = 0.0
    """Event loop's time; so is `seen_at`."""
    seen_at: list[float] = field(default_factory=list)
    """When the client saw new text (streams), and the end."""

    @property
    def is_over(self) -> bool:
        return self.seconds > 0

    @property
    def is_right(self) -> bool:
        is_ended_once = self.is_whole and self.finish_reason is not None and not self.broken
        return self.status == 200 and self.error is None and is_ended_once and self.text == self.expected

    @property
    def is_truthful(self) -> bool:
        """Right, or an error that is said aloud and no wrong text before it."""
        if self.is_right:
            return True
        is_error_object = self.error is not None and bool(self.error.get("code")) and bool(self.error.get("message"))
        is_ended_once = self.is_whole and self.finish_reason is None and not self.broken
        return is_error_object and is_ended_once and self.expected.startswith(self.text)


@dataclass(slots=True)
class Ledger:
    client: httpx.AsyncClient
    model: str = "sim"
    lines: list[Line] = field(default_factory=list)
    answer_limit_s: float = ANSWER_LIMIT_S

    async def ask(
        self,
        prompt: str,
        *,
        max_tokens: int = 16,
        stream: bool = False,
        leave_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        expected: str | None = None,
        **more: object,
    ) -> Line:
        """One greedy completion, entered whatever becomes of it. `leave_after_s`: then the client hangs up.

        `expected`: where it isn't just the prompt's start.
        """
        right = prompt[:max_tokens] if expected is None else expected
        line = Line(prompt=prompt, expected=right, is_stream=stream, asked_at=asyncio.get_running_loop().time())
        self.lines.append(line)
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        try:
            async with asyncio.timeout(leave_after_s if leave_after_s is not None else self.answer_limit_s):
                await self._exchange(line, {**body, **more}, headers or {})
        except TimeoutError:
            line.is_left = leave_after_s is not None
            line.broken = "" if line.is_left else f"no answer within {self.answer_limit_s} s"
        except httpx.HTTPError as error:
            line.broken = repr(error)
        line.seconds = asyncio.get_running_loop().time() - line.asked_at
        return line

    async def _exchange(self, line: Line, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        async with self.client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            line.status = response.status_code
            line.request_id = response.headers.get("x-request-id", "")
            if not response.headers["content-type"].startswith("text/event-stream"):
                document = json.loads(await response.aread())
                line.is_whole = True
                line.seen_at.append(asyncio.get_running_loop().time())
                line.error = document.get("error")
                if line.error is None:
                    line.text = document["choices"][0]["text"]
                    line.finish_reason = document["choices"][0]["finish_reason"]
                return
            async for text in response.aiter_lines():
                if not text.startswith("data: "):
                    continue
                has_ended = line.is_whole or line.error is not None
                if line.is_whole or (has_ended and text != "data: [DONE]"):
                    line.broken = f"after its end came {text[:200]}"
                if text == "data: [DONE]":
                    line.is_whole = True
                    continue
                line.seen_at.append(asyncio.get_running_loop().time())
                event = json.loads(text.removeprefix("data: "))
                line.error = event.get("error", line.error)
                for choice in event.get("choices", ()):
                    if line.finish_reason is not None:
                        line.broken = f"after finish reason {line.finish_reason} came {text[:200]}"
                    line.text += choice["text"]
                    line.finish_reason = choice["finish_reason"]

    def all_right(self) -> None:
        """Fails unless every client that stayed got its own right answer."""
        wrong = [line for line in self.lines if not line.is_left and not line.is_right]
        assert not wrong, (f"{len(wrong)} of {len(self.lines)} wrong", wrong[:3])

    def all_truthful(self, *codes: str) -> None:
        """Fails unless every client got a right answer or one of these errors; and nobody a broken connection."""
        wrong = [
            line
            for line in self.lines
            if not line.is_left
            and not (line.is_right or (line.is_truthful and line.error and line.error["code"] in codes))
        ]
        assert not wrong, (f"{len(wrong)} of {len(self.lines)} wrong", wrong[:3])

    @property
    def num_right(self) -> int:
        return sum(line.is_right for line in self.lines)


def text_of(length: int, rng: random.Random) -> str:
    """Printable, and hardly ever twice the same."""
    return "".join(rng.choices(string.ascii_letters + string.digits + " ", k=length))
