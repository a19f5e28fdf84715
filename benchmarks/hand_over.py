"""What the pipeline itself costs: sim engine with zero time; real server, sockets and Mooncake transfers.

    python -m benchmarks.hand_over [--rounds 3]

Per round, in one run: added time to first token at concurrency 1 (less a bare HTTP echo of the same framework),
requests/s (128-token prompts, 16 out, not streamed, concurrency 32), streamed tokens/s (64 x 256). Each round is
printed; the summary is the median with the lowest and highest round. The load client runs on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.load_client import Response, http_request, run_load
from pdq.cli.deployment import Deployment, DeploymentSettings
from pdq.cli.gateway_client import is_ready
from pdq.runtime.ports import free_port

PROMPT = "The quick brown fox jumps over the lazy dog. " * 3


def completion(number: int, *, max_tokens: int, is_stream: bool) -> bytes:
    """128 byte-tokens, different for each number, so that no prefix cache helps."""
    prompt = f"{number:08d} {PROMPT}"[:128]
    body = {"model": "sim", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": is_stream}
    return http_request("/v1/completions", body)


class Numbers:
    """Prompts differ over all rounds."""

    def __init__(self) -> None:
        self._next = 0

    def block(self, count: int) -> int:
        start = self._next
        self._next += count
        return start


async def load(port: int, numbers: Numbers, *, concurrency: int, requests: int, max_tokens: int, is_stream: bool):
    start = numbers.block(requests)
    seconds, responses = await run_load(
        "127.0.0.1",
        port,
        concurrency=concurrency,
        requests=requests,
        make_request=lambda n: completion(start + n, max_tokens=max_tokens, is_stream=is_stream),
    )
    check(responses)
    return seconds, responses


def check(responses: list[Response]) -> None:
    bad = [r for r in responses if r.status != 200 or r.error]
    if bad:
        raise SystemExit(f"{len(bad)} of {len(responses)} failed: {bad[0].status} {bad[0].error} {bad[0].body[:300]!r}")


async def one_round(port: int, echo_port: int, numbers: Numbers) -> dict[str, float]:
    _, echoed = await load(echo_port, numbers, concurrency=1, requests=300, max_tokens=16, is_stream=True)
    _, served = await load(port, numbers, concurrency=1, requests=300, max_tokens=16, is_stream=True)
    floor_ms = statistics.median(r.first_data_s for r in echoed) * 1000
    ttft_ms = statistics.median(r.first_data_s for r in served) * 1000
    seconds, _ = await load(port, numbers, concurrency=32, requests=2000, max_tokens=16, is_stream=False)
    rate = 2000 / seconds
    seconds, streams = await load(port, numbers, concurrency=64, requests=192, max_tokens=256, is_stream=True)
    return {
        "echo first byte ms": floor_ms,
        "time to first token ms": ttft_ms,
        "added time to first token ms": ttft_ms - floor_ms,
        "requests/s": rate,
        "streamed tokens/s": 192 * 256 / seconds,
        "events per stream": statistics.mean(r.num_events for r in streams),
    }


@contextlib.asynccontextmanager
async def echo_server() -> AsyncIterator[int]:
    port = free_port()
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.echo_app", str(port))
    try:
        while not await asyncio.to_thread(is_ready, f"http://127.0.0.1:{port}"):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    arguments = parser.parse_args()
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = DeploymentSettings(
            engine="sim",
            prefill=arguments.prefill,
            decode=arguments.decode,
            http_port=free_port(),
            run_dir=Path(folder) / "run",
            log_level="warning",
        )
        numbers = Numbers()
        async with echo_server() as echo_port, Deployment(settings, environ=dict(os.environ)) as deployment:  # noqa: TID251 - handed on
            await deployment.wait_until_ready()
            await load(settings.http_port, numbers, concurrency=8, requests=200, max_tokens=16, is_stream=True)
            for number in range(arguments.rounds):
                rounds.append(await one_round(settings.http_port, echo_port, numbers))
                print(f"round {number + 1}: " + ", ".join(f"{k} {v:,.2f}" for k, v in rounds[-1].items()), flush=True)
    print("\n| figure | median | lowest | highest |\n|---|---|---|---|")
    for name in rounds[0]:
        values = [figures[name] for figures in rounds]
        print(f"| {name} | {statistics.median(values):,.2f} | {min(values):,.2f} | {max(values):,.2f} |")


if __name__ == "__main__":
    asyncio.run(main())
