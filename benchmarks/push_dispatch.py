"""Late binding (pdq's queue) beside dispatchers that choose a prefill worker at arrival, over the same processes.

    python -m benchmarks.push_dispatch speeds [--rounds 3]
    python -m benchmarks.push_dispatch replay TRACE.jsonl.gz [--arrivals trace|poisson] [--speed-up 1.25]

speeds: two prefill workers, one 5 times slower; 48 prompts of 256 to 2048 tokens, 8 at a time.
replay: 2,000 requests of a trace, lengths and order as they are, time scaled to the wanted load of 4 equal workers.

Equal in all arms: client, HTTP, gateway, Redis, prefill and decode workers, sim engines and their time formula, KV
hand-over, one output token. Different: a pushing gateway fills one first-come-first-served queue per worker
(`pushing_gateway.py`), pdq fills one for all, in its own order. Prompts share no prefix. The arms
run at the same time, so that whatever else the machine does meets all of them alike. TTFT: from the planned arrival
to the first streamed text, at the client.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass

import psutil

from benchmarks import fleet
from benchmarks.fleet import ARMS, Arm, PrefillTime
from benchmarks.load_client import Response, connect, http_request, run_load
from benchmarks.trace import Plan, plan_of

MOCKER = PrefillTime(fixed_ms=16.50142, token_ms=1.518344e-2, square_ms=4.209989e-7)
"""Dynamo mocker's default formula; its users slow it down by a factor."""
LLAMA_8B_H200 = PrefillTime(fixed_ms=1.475, token_ms=0.018492, square_ms=5.474e-7)
_ANSWER_LIMIT_S = 300.0
_TEXT = "The quick brown fox jumps over the lazy dog. " * 3000


@dataclass(frozen=True, slots=True)
class Outcome:
    makespan_s: float
    ttft_s: list[float]
    """Sorted."""
    cpu_share: float
    """Of all cores, by the arm's processes."""
    busy_share: float
    """Of all cores, by everybody."""

    def at(self, share: float) -> float:
        return self.ttft_s[min(len(self.ttft_s) - 1, int(share * len(self.ttft_s)))]


def request(number: int, num_tokens: int) -> bytes:
    """As many byte-tokens; no two prompts begin alike."""
    prompt = f"{number:08d} {_TEXT}"[:num_tokens]
    body = {"model": "sim", "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    return http_request("/v1/completions", body)


def ttft_s(response: Response) -> float:
    if response.status != 200 or response.error or not response.first_data_s:
        raise SystemExit(f"a request failed: {response.status} {response.error} {response.body[:300]!r}")
    return response.first_data_s


async def warm_up(port: int) -> None:
    """Every worker's links and transfers, and what its prefills take."""
    _, responses = await run_load(
        "127.0.0.1",
        port,
        concurrency=8,
        requests=24,
        make_request=lambda n: request(90_000_000 + n, 256 + n * 997 % 1793),
    )
    for response in responses:
        ttft_s(response)


async def closed(port: int, lengths: list[int], *, concurrency: int) -> tuple[float, list[float]]:
    makespan_s, responses = await run_load(
        "127.0.0.1",
        port,
        concurrency=concurrency,
        requests=len(lengths),
        make_request=lambda number: request(number, lengths[number]),
    )
    return makespan_s, [ttft_s(response) for response in responses]


async def replay(port: int, plan: Plan) -> tuple[float, list[float]]:
    """Open loop: sends at the planned times, however many are under way."""

    async def one(number: int, planned_at: float) -> float:
        connection = await connect("127.0.0.1", port)  # its own: the gateway closes those that idle
        sent_at = time.perf_counter()
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            response = await connection.send(request(number, plan.lengths[number]), keep_body=False)
        connection.close()
        return sent_at - planned_at + ttft_s(response)

    started_at = time.perf_counter()
    tasks = []
    for number, arrival_s in enumerate(plan.arrivals_s):
        await asyncio.sleep(max(0.0, started_at + arrival_s - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number, started_at + arrival_s)))
    times = await asyncio.gather(*tasks)
    return time.perf_counter() - started_at, times


async def run_arm(
    arm: Arm, speeds: list[PrefillTime], mode: str, work: Plan | list[int], together: asyncio.Barrier
) -> Outcome:
    async with fleet.running(arm, speeds, mode=mode) as running:
        await warm_up(running.port)
        await together.wait()
        idle_s, cpu_s = psutil.cpu_times().idle, running.cpu_s()
        if isinstance(work, Plan):
            makespan_s, times = await replay(running.port, work)
        else:
            makespan_s, times = await closed(running.port, work, concurrency=8)
        available_s = makespan_s * (psutil.cpu_count() or 1)
        own_share = (running.cpu_s() - cpu_s) / available_s
        busy_share = 1 - (psutil.cpu_times().idle - idle_s) / available_s
        outcome = Outcome(makespan_s, sorted(times), own_share, busy_share)
        await together.wait()
        return outcome


def report(outcomes: dict[str, list[Outcome]]) -> None:
    """Medians over the rounds, with lowest and highest; ratios are made within a round, then the same."""
    figures = {
        "makespan s": lambda o: o.makespan_s,
        "mean s": lambda o: statistics.mean(o.ttft_s),
        "p50 s": lambda o: o.at(0.5),
        "p90 s": lambda o: o.at(0.9),
        "p99 s": lambda o: o.at(0.99),
        "max s": lambda o: o.ttft_s[-1],
    }
    print("\n| dispatch | " + " | ".join(figures) + " |\n|---" * 1 + "|---" * len(figures) + "|")
    for name, rounds in outcomes.items():
        print(f"| {name} | " + " | ".join(spread([figure(o) for o in rounds]) for figure in figures.values()) + " |")
    pdq = outcomes.get("pdq", [])
    for name, rounds in outcomes.items() if pdq else ():
        ratios = (
            spread([figure(own) / figure(other) for own, other in zip(pdq, rounds, strict=True)])
            for figure in figures.values()
        )
        print(f"| pdq / {name} | " + " | ".join(ratios) + " |")


def spread(values: list[float]) -> str:
    middle = f"{statistics.median(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f}-{max(values):.3f})"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speeds", "replay"))
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--arms", default="", help=f"comma separated; of: {', '.join(ARMS)}")
    parser.add_argument("--lengths", default="256-2048", help="speeds: of the prompts")
    parser.add_argument("--apart", action="store_true", help="one arm after the other")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--mode", default="pull", choices=("pull", "push"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--skip", type=int, default=0, help="rows of the trace")
    parser.add_argument("--load", type=float, default=0.85)
    parser.add_argument("--speed-up", type=float, default=1.25, help="of arrivals and of the device")
    parser.add_argument("--arrivals", default="trace", choices=("trace", "poisson"))
    options = parser.parse_args()
    if options.what == "speeds":
        speeds = [MOCKER.slower(1 / 0.2), MOCKER.slower(1 / 0.04)]
        names = options.arms or "pdq,round robin,least loaded"
    else:
        if options.trace is None:
            parser.error("replay needs the trace's path")
        speeds = [LLAMA_8B_H200.slower(1 / options.speed_up)] * 4
        names = options.arms or "pdq,round robin,two choices"
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names.split(",")}
    for number in range(options.rounds):
        work: Plan | list[int]
        if options.what == "speeds":
            rng = random.Random(number)
            shortest, longest = map(int, options.lengths.split("-"))
            work = [rng.randint(shortest, longest) for _ in range(48)]
        else:
            work = plan_of(options.trace, options, speeds, seed=number)
        groups = [[name] for name in outcomes] if options.apart else [list(outcomes)]
        for group in groups:
            together = asyncio.Barrier(len(group))
            runs = (run_arm(ARMS[name], speeds, options.mode, work, together) for name in group)
            for name, outcome in zip(group, await asyncio.gather(*runs), strict=True):
                outcomes[name].append(outcome)
        for name, done in outcomes.items():
            last = done[-1]
            print(
                f"round {number + 1} {name}: makespan {last.makespan_s:.2f} s, TTFT p50 {last.at(0.5):.3f} p90 "
                f"{last.at(0.9):.3f} p99 {last.at(0.99):.3f} max {last.ttft_s[-1]:.3f} s; "
                f"CPU {last.cpu_share:.0%} of the machine, {last.busy_share:.0%} with all others",
                flush=True,
            )
    report(outcomes)


if __name__ == "__main__":
    asyncio.run(main())
