"""One streamed completion as token ids, with the moment of each. For any OpenAI-compatible server."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(slots=True)
class Streamed:
    """Times are of `time.monotonic`, which all processes of a machine share."""

    sent_at: float
    token_ids: list[int] = field(default_factory=list)
    token_at: list[float] = field(default_factory=list)
    """When the event came that brought the token."""
    trace: Mapping[str, Any] | None = None

    @property
    def first_token_s(self) -> float:
        return self.token_at[0] - self.sent_at

    @property
    def step_s(self) -> float:
        """Mean time from one token to the next."""
        return (self.token_at[-1] - self.token_at[0]) / (len(self.token_at) - 1)


def greedy(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Body of such a request; `ignore_eos`: every answer has the same length."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


async def stream(client: httpx.AsyncClient, url: str, body: Mapping[str, Any], **headers: str) -> Streamed:
    """Raises RuntimeError for an answer that is an error, or broken."""
    streamed = Streamed(sent_at=time.monotonic())
    is_whole = False
    async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url}: {response.status_code} {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            now = time.monotonic()
            if line == "data: [DONE]":
                is_whole = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(f"{url}: {event['error']}")
                streamed.trace = event.get("pdq", streamed.trace)
                for choice in event["choices"]:
                    ids = choice.get("token_ids") or []
                    streamed.token_ids += ids
                    streamed.token_at += [now] * len(ids)
    if not is_whole or not streamed.token_ids:
        raise RuntimeError(f"{url}: a stream of {len(streamed.token_ids)} tokens, broken off")
    return streamed
