"""Tokens reach a plain HTTP client one by one, as `curl -N` shows them."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from pathlib import Path

from tests.pipeline.harness import Pipeline, running
from tests.servers import RedisServer

DECODE_MS = 30
KEEPALIVE_S = 0.4
NUM_TOKENS = 20
NUM_TRIES = 5
"""A test on a busy machine may itself read late, and several tokens at once: it does so once or twice, not always."""


@dataclass(slots=True)
class Curl:
    """What curl printed: the head, and each line of the body with the time at which it could be read."""

    head: list[str]
    lines: list[tuple[float, str]]
    code: int

    @property
    def data(self) -> list[tuple[float, str]]:
        return [(at, line.removeprefix("data: ")) for at, line in self.lines if line.startswith("data: ")]

    def header(self, name: str) -> str:
        return next((h.split(":", 1)[1].strip() for h in self.head if h.lower().startswith(f"{name}:")), "")


async def curl(url: str, body: dict[str, object], *options: str) -> Curl:
    command = ["curl", "-N", "-s", "-i", "-m", "60", "-H", "Content-Type: application/json", *options]
    process = await asyncio.create_subprocess_exec(
        *command, "-d", json.dumps(body), url, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    result = Curl(head=[], lines=[], code=0)
    is_head = True
    while raw := await process.stdout.readline():
        line = raw.decode().rstrip("\r\n")
        if is_head:
            is_head = bool(line)
            result.head.append(line)
        else:
            result.lines.append((time.monotonic(), line))
    result.code = await process.wait()
    return result


def slow(tmp_path: Path, server: RedisServer, **more: str):
    return running(tmp_path, server, environ={"PDQ_DECODE_WORKER__SIM_DECODE_MS": str(DECODE_MS), **more})


async def test_curl_sees_tokens_one_by_one_and_the_end(tmp_path: Path, private_redis: RedisServer) -> None:
    prompt = "the quick brown fox jumps over the lazy dog"
    async with slow(tmp_path, private_redis) as pipeline:
        url = f"{pipeline.url}/v1/completions"
        body = {"model": "sim", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}

        for number in range(NUM_TRIES):
            result = await curl(url, {**body, "prompt": f"{number} {prompt}"}, "-H", "X-Request-Id: from-curl")
            tokens = check_stream(result, f"{number} {prompt}"[:NUM_TOKENS])
            gaps_ms = sorted((b - a) * 1000 for a, b in itertools.pairwise(tokens))
            is_slow = tokens[-1] - tokens[0] > DECODE_MS * (NUM_TOKENS - 2) * 0.8 / 1000
            if is_one_by_one := is_slow and gaps_ms[len(gaps_ms) // 2] > DECODE_MS * 0.6:
                break
        assert is_one_by_one, gaps_ms
        await pipeline.quiet()


def check_stream(result: Curl, text: str) -> list[float]:
    """When each token could be read."""
    assert result.code == 0
    assert result.head[0].split()[1] == "200"
    assert result.header("content-type") == "text/event-stream; charset=utf-8"
    assert result.header("cache-control") == "no-cache"
    assert result.header("x-accel-buffering") == "no"
    assert result.header("x-request-id") == "from-curl"
    assert result.data[-1][1] == "[DONE]"
    tokens = [
        (at, choice["text"])
        for at, line in result.data[:-1]
        for choice in json.loads(line)["choices"]
        if choice["text"]
    ]
    assert "".join(piece for _, piece in tokens) == text
    assert len(tokens) >= NUM_TOKENS - 1, "a chunk carries one token"
    return [at for at, _ in tokens]


async def test_each_event_is_one_data_line_and_an_empty_line(tmp_path: Path, private_redis: RedisServer) -> None:
    async with slow(tmp_path, private_redis) as pipeline:
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": "a\nb\r\nc data: [DONE]"}],
            "max_tokens": 30,
            "stream": True,
        }

        result = await curl(f"{pipeline.url}/v1/chat/completions", body)

        assert all(not line or line.startswith("data: ") for _, line in result.lines)
        texts = [line for _, line in result.lines]
        assert all(texts[i + 1] == "" for i, text in enumerate(texts) if text)
        contents = [json.loads(line)["choices"][0]["delta"].get("content") or "" for _, line in result.data[:-1]]
        assert "".join(contents) == "a\nb\r\nc data: [DONE]"
        await pipeline.quiet()


async def test_a_long_prefill_keeps_the_stream_alive_with_comments(tmp_path: Path, private_redis: RedisServer) -> None:
    environ = {
        "PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "1500",
        "PDQ_GATEWAY__SSE_FIRST_EVENT_S": str(KEEPALIVE_S),
        "PDQ_GATEWAY__SSE_KEEPALIVE_S": str(KEEPALIVE_S),
    }
    async with slow(tmp_path, private_redis, **environ) as pipeline:
        body = {"model": "sim", "prompt": "patience", "max_tokens": 3, "stream": True}

        asked_at = time.monotonic()
        result = await curl(f"{pipeline.url}/v1/completions", body)

        comments = [line for _, line in result.lines if line.startswith(":")]
        assert 1 <= len(comments) <= (result.data[-1][0] - asked_at) / KEEPALIVE_S, comments
        assert result.data[-1][1] == "[DONE]"
        await pipeline.quiet()


async def test_a_refused_stream_is_plain_json_with_its_status(tmp_path: Path, private_redis: RedisServer) -> None:
    async with slow(tmp_path, private_redis) as pipeline:
        await _check_refusals(pipeline)


async def _check_refusals(pipeline: Pipeline) -> None:
    url = f"{pipeline.url}/v1/completions"
    bad = await curl(url, {"model": "sim", "prompt": "x", "max_tokens": 0.5, "stream": True})
    unknown = await curl(url, {"model": "other", "prompt": "x", "stream": True})

    for result, status in ((bad, "400"), (unknown, "404")):
        assert result.head[0].split()[1] == status
        assert result.header("content-type") == "application/json"
        error = json.loads(result.lines[0][1])["error"]
        assert set(error) == {"message", "type", "param", "code"}
