"""Many mixed requests at once through the light load client, each checked against what it should have got."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from benchmarks.load_client import Response, http_request, run_load
from tests.pipeline.harness import Pipeline
from tests.pipeline.ledger import text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    prompt: str
    max_tokens: int

    @property
    def expected(self) -> str:
        """The simulated engine echoes."""
        return self.prompt[: self.max_tokens]


def mixed_requests(count: int, *, seed: int, lengths: tuple[int, ...] = (1, 15, 16, 17, 100, 300, 1500)) -> list[Asked]:
    """Lengths around the block size, long ones, and shared prefixes."""
    rng = random.Random(seed)
    shared = text_of(max(lengths), rng)
    asked = []
    for _ in range(count):
        length = rng.choice(lengths)
        common = rng.choice((0, length // 2)) if length > 20 else 0
        prompt = shared[:common] + text_of(length - common, rng)
        asked.append(Asked(prompt=prompt, max_tokens=rng.choice((1, 2, 8, 40))))
    return asked


async def run_mixed(pipeline: Pipeline, asked: list[Asked], *, concurrency: int) -> None:
    """Asks all; AssertionError when one is not answered, or not right."""

    def request(number: int) -> bytes:
        body = {"model": pipeline.model, "prompt": asked[number].prompt, "temperature": 0}
        return http_request("/v1/completions", {**body, "max_tokens": asked[number].max_tokens})

    _, responses = await run_load(
        "127.0.0.1", pipeline.port, concurrency=concurrency, requests=len(asked), make_request=request, keep_body=True
    )
    wrong = [
        (len(ask.prompt), ask.max_tokens, response.status, response.error, response.body[:300])
        for ask, response in zip(asked, responses, strict=True)
        if _answer(response) != ask.expected
    ]
    assert not wrong, f"{len(wrong)} of {len(asked)} wrong: {wrong[:3]}"


def _answer(response: Response) -> str | None:
    if response.status != 200:
        return None
    text: str = json.loads(response.body)["choices"][0]["text"]
    return text
