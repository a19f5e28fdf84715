"""A prefill worker dies, or stops, while twelve requests are in flight: what the clients get, and how long it takes.

    python -m benchmarks.fault_scenarios [--modes push,pull] [--rounds 3]

The scenarios are those in which NVIDIA Dynamo 1.6.1's mocker was measured: 2 prefill workers that need 1 to 2 s for a
prefill (here 1.5 s), 1 decode worker, 12 requests at once, afterwards 8 more. All times are pdq's defaults (lease 6 s,
renewed every 2 s).

    kill            kill -9 of one prefill worker 1.5 s after the requests; it is not started again
    stop            SIGSTOP of one prefill worker and its engine after 1 s; it never wakes up
    stop and wake   the same; SIGCONT 15 s later, when others have done its work

A request is *lost* when it ends with an error, *hung* without an end within 45 s. *Recovered*: from the strike until
the jobs that the victim was computing are no longer its own (reaped, or enqueued again by the gateway), so that the
other one takes them next; the time of the prefill itself comes on top.

*Lease left* at the strike: 4 to 6 s, by chance; it explains most of the recovery. In pull nothing else tells of the
victim: expiry, then up to a second until somebody reaps. In push the decode worker that waits for the KV tells as well,
when the victim has left six questions unanswered: 3.3 + 3 s after its last answer, which may be before the lease ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil
import redis.asyncio

from benchmarks.load_client import Response, connect, http_request
from broker.delivery import QueueSettings
from broker.keys import GROUP, Keys
from pdq.cli.deployment import Deployment, DeploymentSettings
from pdq.runtime.model import ModelSettings
from pdq.runtime.ports import free_port

NUM_REQUESTS: Final = 12
NUM_AFTERWARDS: Final = 8
MAX_TOKENS: Final = 16
CLIENT_LIMIT_S: Final = 45.0
PREFILL_MS: Final = 1500
LEASE_S: Final = QueueSettings().lease_s
ENVIRON: Final = {"PDQ_PREFILL_WORKER__SIM_PREFILL_MS": str(PREFILL_MS), "PDQ_GATEWAY__LOCAL_MAX_TOKENS": "0"}
_NEVER_S: Final = 3600.0
_PACE_S: Final = 0.02
_MAX_GENS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    at_s: float
    is_kill: bool
    wakes_after_s: float | None = None


SCENARIOS: Final = (
    Scenario(name="kill", at_s=1.5, is_kill=True),
    Scenario(name="stop", at_s=1.0, is_kill=False),
    Scenario(name="stop and wake", at_s=1.0, is_kill=False, wakes_after_s=15.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one scenario. Times in seconds."""

    answers: Sequence[Response]
    afterwards: Sequence[Response]
    num_held: int
    """Requests that the victim was computing."""
    lease_left_s: float
    """Of the youngest of their leases, at the strike."""
    recovered_s: float

    @staticmethod
    def count(responses: Sequence[Response]) -> tuple[int, int, int]:
        """(right, lost, hung)."""
        num_hung = sum(not response.total_s and not response.error for response in responses)
        num_right = sum(not response.error and response.total_s > 0 for response in responses)
        return num_right, len(responses) - num_right - num_hung, num_hung

    @property
    def slowest_s(self) -> float:
        return max(response.total_s or CLIENT_LIMIT_S for response in self.answers)


async def play(
    scenario: Scenario, *, port: int, store: redis.asyncio.Redis, model: str, victim: psutil.Process
) -> Outcome:
    """Against a running deployment of two prefill workers, `victim` one of them, and one decode worker.

    The strike comes at its time, but not before the victim has a job.
    """
    queue = _Queue(store, Keys(model), victim.pid)
    parts = [victim, *victim.children()]
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(ask(port, model, f"{scenario.name} {n}")) for n in range(NUM_REQUESTS)]
        await asyncio.sleep(scenario.at_s)
        while not (held := await queue.held()):  # noqa: ASYNC110 - another process
            await asyncio.sleep(_PACE_S)
        struck_at = asyncio.get_running_loop().time()
        for process in parts:
            process.kill() if scenario.is_kill else process.suspend()
        if scenario.wakes_after_s is not None:
            group.create_task(_wake_up(parts, scenario.wakes_after_s))
        recovering = group.create_task(queue.until_free(list(held)))
        try:
            async with asyncio.timeout(CLIENT_LIMIT_S):
                recovered_s = await recovering - struck_at
        except TimeoutError:
            recovered_s = CLIENT_LIMIT_S
    afterwards = await asyncio.gather(*(ask(port, model, f"{scenario.name} later {n}") for n in range(NUM_AFTERWARDS)))
    for process in parts:  # so that it can be ended in order
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
    return Outcome(
        answers=[task.result() for task in asking],
        afterwards=afterwards,
        num_held=len(held),
        lease_left_s=LEASE_S - min(held.values()),
        recovered_s=recovered_s,
    )


async def ask(port: int, model: str, name: str) -> Response:
    """One streamed request. `error` also names a wrong text; neither `error` nor `total_s`: no end in time."""
    prompt = f"{name}: the quick brown fox jumps over the lazy dog"
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    connection = await connect("127.0.0.1", port)
    try:
        async with asyncio.timeout(CLIENT_LIMIT_S):
            response = await connection.send(http_request("/v1/completions", body), keep_body=True)
    except TimeoutError:
        return Response()
    finally:
        connection.close()
    if response.status != 200 and not response.error:
        response.error = f"{response.status} {response.body[:200]!r}"
    elif not response.error and _text(response.body) != prompt[:MAX_TOKENS]:
        response.error = f"wrong: {response.body[-300:]!r}"
    return response


def _text(body: bytes) -> str:
    """Of all chunks of a stream."""
    events = (line[6:] for line in body.split(b"\n") if line.startswith(b"data: {"))
    return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", ()))


class _Queue:
    """What Redis says of one prefill worker."""

    def __init__(self, store: redis.asyncio.Redis, keys: Keys, pid: int) -> None:
        self._store = store
        self._keys = keys
        self._mark = f"-{pid}-"

    async def held(self) -> dict[str, float]:
        """Ids of the requests that it computes, and the seconds since their leases began or were renewed."""
        pending = await self._store.xpending_range(self._keys.stream, GROUP, "-", "+", 1000)
        ages = {
            entry["message_id"]: entry["time_since_delivered"] / 1000
            for entry in pending
            if self._mark in entry["consumer"].decode()
        }
        found = {entry: await self._store.xrange(self._keys.stream, entry, entry) for entry in ages}
        return {fields[b"id"].decode(): ages[entry] for entry, rows in found.items() for _, fields in rows}

    async def until_free(self, request_ids: Sequence[str]) -> float:
        """Until none of these is its own any more; the event loop's time then."""
        while any([await self._is_its_own(request_id) for request_id in request_ids]):  # noqa: ASYNC110
            await asyncio.sleep(_PACE_S)
        return asyncio.get_running_loop().time()

    async def _is_its_own(self, request_id: str) -> bool:
        for gen in range(_MAX_GENS, 0, -1):
            state, worker = await self._store.hmget(self._keys.req(request_id, gen), "state", "worker")
            if state is not None:
                return state == b"prefill" and self._mark in worker.decode()
        return False


async def _wake_up(processes: Sequence[psutil.Process], after_s: float) -> None:
    await asyncio.sleep(after_s)
    for process in processes:
        process.resume()


@contextlib.asynccontextmanager
async def deployed(mode: Literal["push", "pull"]) -> AsyncIterator[Deployment]:
    """Who is killed stays away."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PDQ_")}  # noqa: TID251 - handed on
    with tempfile.TemporaryDirectory() as folder:
        settings = DeploymentSettings(
            engine="sim",
            prefill=2,
            decode=1,
            model=ModelSettings(mode=mode),
            http_port=free_port(),
            run_dir=Path(folder) / "run",
            log_level="warning",
            restart_min_s=_NEVER_S,
            restart_max_s=_NEVER_S,
        )
        async with Deployment(settings, environ={**inherited, **ENVIRON}) as deployment:
            await deployment.wait_until_ready()
            yield deployment


async def run(scenario: Scenario, mode: Literal["push", "pull"]) -> Outcome:
    """In a deployment of its own."""
    async with deployed(mode) as deployment:
        store = redis.asyncio.from_url(deployment.redis_url)
        victim = next(child.pid for child in deployment.children if child.name == "prefill-1")
        try:
            return await play(
                scenario,
                port=deployment.settings.http_port,
                store=store,
                model=deployment.settings.served_model.name,
                victim=psutil.Process(victim),
            )
        finally:
            await store.aclose()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="push,pull")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scenarios", default=",".join(scenario.name for scenario in SCENARIOS))
    options = parser.parse_args()
    print("| scenario | mode | right / lost / hung of 12 | next 8 | lease left | recovered after | slowest answer |")
    print("|---|---|---|---|---|---|---|")
    for scenario in [scenario for scenario in SCENARIOS if scenario.name in options.scenarios.split(",")]:
        for mode in options.modes.split(","):
            outcomes = [await run(scenario, mode) for _ in range(options.rounds)]
            _print_row(scenario, mode, outcomes)


def _print_row(scenario: Scenario, mode: str, outcomes: Sequence[Outcome]) -> None:
    def sums(counts: Sequence[tuple[int, int, int]]) -> str:
        return " / ".join(str(sum(column)) for column in zip(*counts, strict=True))

    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.1f} s ({min(values):.1f} - {max(values):.1f})"

    answers = sums([Outcome.count(outcome.answers) for outcome in outcomes])
    afterwards = sums([Outcome.count(outcome.afterwards) for outcome in outcomes])
    left = spread([outcome.lease_left_s for outcome in outcomes])
    recovered = spread([outcome.recovered_s for outcome in outcomes])
    slowest = spread([outcome.slowest_s for outcome in outcomes])
    print(f"| {scenario.name} | {mode} | {answers} | {afterwards} | {left} | {recovered} | {slowest} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
