"""One chaos run from start to verdict. It leaves plan.jsonl, requests.jsonl and the processes' logs in its folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx

from tests.chaos import plan, recovery
from tests.chaos.clients import Load
from tests.chaos.plan import Kind
from tests.chaos.recovery import Recovery
from tests.chaos.strikes import Striker, Struck
from tests.chaos.verdict import Verdict, judge_answers, judge_queue, judge_rest
from tests.pipeline import process_logs
from tests.pipeline.harness import Pipeline, eventually, running
from tests.pipeline.ledger import Ledger
from tests.pipeline.leftovers import open_files
from tests.servers import RedisServer, redis_binary

Mode = Literal["push", "pull"]
LEASE_S: Final = 2.0
HEARTBEAT_S: Final = 1.0
ENVIRON: Final = {
    # Short times, so that much happens in a short run.
    "PDQ_PREFILL_WORKER__LEASE_S": str(LEASE_S),
    "PDQ_PREFILL_WORKER__PREFILL_STALL_S": "2",
    "PDQ_DECODE_WORKER__DECODE_STALL_S": "2",
    "PDQ_GATEWAY__STALL_S": "2",
    "PDQ_GATEWAY__OWNER_SILENCE_S": "1.5",
    "PDQ_GATEWAY__OWNER_KV_WAIT_S": "6",
    "PDQ_PREFILL_WORKER__ORPHAN_S": "6",
    "PDQ_REDIS_GAP_S": "1",
    # So many misfortunes meet nobody outside of this.
    "PDQ_GATEWAY__MAX_MIGRATIONS": "20",
    "PDQ_PREFILL_WORKER__MAX_FAILURES": "20",
    # A device's times; some prompts are short enough for the local flow.
    "PDQ_PREFILL_WORKER__SIM_PREFILL_TOKEN_MS": "0.3",
    "PDQ_DECODE_WORKER__SIM_DECODE_MS": "10",
    "PDQ_GATEWAY__LOCAL_MAX_TOKENS": "12",
    # The queue's account of every request is read at the end.
    "PDQ_PREFILL_WORKER__REQ_TTL_S": "3600",
    "PDQ_GATEWAY__REQ_TTL_S": "3600",
}
PROVOKED: Final = ("fault", "the engine process ended", "engine_stalled", "forced_exit")
"""Errors that workers log when they are struck."""
NOISE_LINES_PER_S: Final = 100
BACK_LIMIT_S: Final = 120.0
ANSWER_LIMIT_S: Final = 120.0
"""Far more than a request takes even when every worker of a role has to be started again on a busy machine."""
LONG_S: Final = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    seed: int
    mode: Mode
    seconds: float
    kinds: frozenset[Kind]
    verdict: Verdict
    struck: tuple[Struck, ...]
    recoveries: tuple[Recovery, ...]
    folder: Path


def redis_for_chaos(folder: Path) -> RedisServer:
    """Its files are `folder`'s. What the kernel has outlives the process, so a sync per second loses nothing here."""
    return RedisServer(redis_binary(), folder, appendonly=True, options=("--appendfsync", "everysec"))


async def run(
    folder: Path, server: RedisServer, *, seed: int, mode: Mode, seconds: float, kinds: Iterable[Kind] = tuple(Kind)
) -> Report:
    """`folder` must be empty; `server`: to be killed and started again, with AOF. AssertionError: it didn't start."""
    planned = plan.strikes(seed, seconds, kinds)
    (folder / "plan.jsonl").write_text(plan.as_lines(planned))
    verdict = Verdict()
    async with running(
        folder,
        server,
        gateways=plan.GATEWAYS,
        prefill=plan.PREFILL,
        decode=plan.DECODE,
        mode=mode,
        environ=ENVIRON,
        log_level="warning",
        restart_s=(0.5, 1.0),
        allowed_faults=("",),  # judged below, so that a run that fails tells all it knows
        noise_lines=10**9,
    ) as pipeline:
        async with _ledgers(pipeline) as ledgers:
            await _ask_each(ledgers, "before", 8)
            await pipeline.quiet()
            before = open_files(pipeline)
            load = Load(seed, ledgers)
            striker = Striker(pipeline, server, load.open_ids)
            async with asyncio.TaskGroup() as group:
                group.create_task(load.run())
                started = time.monotonic()
                await striker.run(planned)
                await asyncio.sleep(max(0.0, started + seconds - time.monotonic()))
                load.stop()
            await striker.scale_back()
            try:
                await _wait_until_back(pipeline)
            except AssertionError as error:
                striker.problems.append(str(error))
            problems = await _ask_each(ledgers, "afterwards", 8)
        verdict.say(
            "I5 service goes on",
            "every process came back; everybody is answered right after the last strike",
            [*striker.problems, *problems],
        )
        judge_answers(verdict, load.asked, striker.struck)
        is_short = seconds < LONG_S  # then the links to the dead are not waited for
        await judge_rest(verdict, pipeline, before, num_ended=_num_ended(striker.struck) if is_short else None)
        await judge_queue(verdict, pipeline)
    faults = process_logs.faults(
        pipeline.log_dir, allowed=PROVOKED, noise_lines=round(NOISE_LINES_PER_S * seconds) + 1000
    )
    verdict.say("logs", "no error that was not provoked", faults)
    struck = tuple(sorted(striker.struck, key=lambda one: one.at))
    (folder / "requests.jsonl").write_text("".join(_request_line(load, started)))
    return Report(
        seed=seed,
        mode=mode,
        seconds=seconds,
        kinds=frozenset(kinds),
        verdict=verdict,
        struck=struck,
        recoveries=tuple(_recoveries(struck, load)),
        folder=folder,
    )


@contextlib.asynccontextmanager
async def _ledgers(pipeline: Pipeline) -> AsyncIterator[dict[str, Ledger]]:
    """One per gateway; their connections are closed at the end."""
    async with contextlib.AsyncExitStack() as clients:
        ledgers = {}
        for number in range(plan.GATEWAYS):
            client = httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{pipeline.port + number}",
                timeout=None,
                limits=httpx.Limits(max_connections=None),
            )
            ledgers[f"gateway-{number + 1}"] = Ledger(
                await clients.enter_async_context(client), answer_limit_s=ANSWER_LIMIT_S
            )
        yield ledgers


async def _ask_each(ledgers: dict[str, Ledger], word: str, count: int) -> list[str]:
    """Some requests of all kinds at each gateway. Those that were not answered right."""
    lines = await asyncio.gather(
        *(
            ledger.ask(f"{number} {name} {word} " * (1 + 20 * (number % 2)), max_tokens=20, stream=number % 4 < 2)
            for name, ledger in ledgers.items()
            for number in range(count)
        )
    )
    return [f"{word}: {line}" for line in lines if not line.is_right]


async def _wait_until_back(pipeline: Pipeline) -> None:
    """All processes run and both gateways are ready."""

    async def away() -> str:
        found = [f"{child.name} {child.state}" for child in pipeline.deployment.children if child.state != "running"]
        records = list((await pipeline.workers()).values())
        for role in ("prefill", "decode"):
            wanted = sum(child.name.startswith(role) for child in pipeline.deployment.children)
            ready = sum(record["role"] == role and record["state"] == "ready" for record in records)
            found += [f"{ready} of {wanted} {role} workers"] if ready != wanted else []
        for number in range(plan.GATEWAYS):
            try:
                async with httpx.AsyncClient() as client:
                    answer = await client.get(f"http://127.0.0.1:{pipeline.port + number}/ready")
                found += [answer.text] if answer.status_code != 200 else []
            except httpx.HTTPError as error:
                found.append(repr(error))
        return "; ".join(found)

    await eventually(away, limit_s=BACK_LIMIT_S, what="deployment")


def _num_ended(struck: Iterable[Struck]) -> int:
    """Processes that were there and are not any more; at most."""
    hangs = {Kind.HANG, Kind.HANG_WORKER, Kind.HANG_ENGINE, Kind.HANG_GATEWAY}
    return sum(2 for one in struck if not one.note and one.strike.victim != "redis" and one.strike.kind not in hangs)


def _recoveries(struck: Iterable[Struck], load: Load) -> Iterable[Recovery]:
    everything = [(one.at, one.until) for one in struck]
    lines = {asked.line.request_id: asked.line for asked in load.asked if asked.line.is_stream}
    for number, one in enumerate(struck):
        others = everything[:number] + everything[number + 1 :]
        for request_id in sorted(one.had & lines.keys()):
            line = lines[request_id]
            seconds = None if line.is_left or line.broken else recovery.recovery_s(one.at, line.seen_at)
            if seconds is not None:
                yield Recovery(
                    kind=one.strike.kind,
                    victim=one.strike.victim,
                    at_s=one.strike.at_s,
                    request_id=request_id,
                    seconds=seconds,
                    is_undisturbed=recovery.is_apart(one.at, one.at + seconds, others),
                )


def _request_line(load: Load, started: float) -> Iterable[str]:
    for asked in load.asked:
        line = asked.line
        yield (
            json.dumps(
                {
                    "request": asked.name,
                    "gateway": asked.gateway,
                    "id": line.request_id,
                    "prompt_chars": len(line.prompt),
                    "max_tokens": asked.ask.max_tokens,
                    "stream": line.is_stream,
                    "leave_after_s": asked.ask.leave_after_s,
                    "timeout_s": asked.ask.timeout_s,
                    "stop": asked.ask.stop,
                    "asked_at_s": round(line.asked_at - started, 3),
                    "seconds": round(line.seconds, 3),
                    "status": line.status,
                    "received_chars": len(line.text),
                    "is_right": line.is_right,
                    "is_left": line.is_left,
                    "error": line.error,
                    "broken": line.broken,
                }
            )
            + "\n"
        )
