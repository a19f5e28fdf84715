"""Carries out what the plan says, and notes what the victim had at that moment."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import psutil
import redis.exceptions

from pdq.cli.main import main
from tests.chaos.plan import DECODE, PREFILL, TAKES_A_WORKER, Kind, Strike
from tests.pipeline.harness import Pipeline, eventually
from tests.servers import RedisServer

LOOK_LIMIT_S = 0.5
AWAY_LIMIT_S = 90.0
MAX_GENS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    strike: Strike
    at: float
    """Event loop's time."""
    until: float
    had: frozenset[str]
    """Ids of the victim's requests; see recovery.py."""
    note: str = ""
    """Why nothing came of it."""


class Striker:
    def __init__(self, pipeline: Pipeline, server: RedisServer, open_ids: Callable[[], list[str]]) -> None:
        """`open_ids`: of the requests whose clients know their id and have no end yet."""
        self._pipeline = pipeline
        self._server = server
        self._open_ids = open_ids
        self._own_redis = asyncio.Lock()
        """On a busy machine a start lasts until the next strike at it."""
        self.struck: list[Struck] = []
        self.problems: list[str] = []
        """Processes that did not come back."""

    async def run(self, planned: tuple[Strike, ...]) -> None:
        """Returns when the last one is over. Each begins at its time, whatever the others do."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        async with asyncio.TaskGroup() as group:
            for strike in planned:
                await asyncio.sleep(max(0.0, started_at + strike.at_s - loop.time()))
                group.create_task(self._strike(strike))

    async def scale_back(self) -> None:
        """To the numbers of the start."""
        await self._scale(f"prefill={PREFILL} decode={DECODE}")

    async def _scale(self, numbers: str, *, waits: bool = True) -> None:
        where = ("--redis", self._pipeline.deployment.redis_url, "--served-model-name", self._pipeline.model)
        flags = () if waits else ("--no-wait",)
        code = await asyncio.to_thread(main, ["scale", *numbers.split(), *flags, *where])
        assert code == 0 or not waits, f"scaling to {numbers} failed"

    async def _strike(self, strike: Strike) -> None:
        loop = asyncio.get_running_loop()
        had = await self._requests_of(strike.victim) if strike.kind in TAKES_A_WORKER else frozenset()
        at, note = loop.time(), ""
        try:
            await self._carry_out(strike)
        except psutil.NoSuchProcess:
            note = "was not there"
        except AssertionError as error:
            self.problems.append(f"{strike}: {error}")
        self.struck.append(Struck(strike=strike, at=at, until=loop.time(), had=had, note=note))

    async def _carry_out(self, strike: Strike) -> None:
        pipeline, victim, lasts_s = self._pipeline, strike.victim, strike.lasts_s
        match strike.kind:
            case Kind.KILL | Kind.KILL_ENGINE | Kind.TERMINATE:
                process = self._process(victim)
                if strike.kind is Kind.KILL_ENGINE:
                    _engine_of(process).kill()
                else:
                    process.send_signal(signal.SIGKILL if strike.kind is Kind.KILL else signal.SIGTERM)
                await self._until_another_works(victim, process)
            case Kind.KILL_GATEWAY | Kind.TERMINATE_GATEWAY:
                process = self._process(victim)
                process.send_signal(signal.SIGKILL if strike.kind is Kind.KILL_GATEWAY else signal.SIGTERM)
                await self._until_another_serves(victim, process)
            case Kind.HANG | Kind.HANG_WORKER | Kind.HANG_ENGINE | Kind.HANG_GATEWAY:
                process = self._process(victim)
                engines = [_engine_of(process)] if strike.kind in (Kind.HANG, Kind.HANG_ENGINE) else []
                async with _stopped([*([] if strike.kind is Kind.HANG_ENGINE else [process]), *engines]):
                    await asyncio.sleep(lasts_s)
            case Kind.SCALE:
                await self._scale(victim, waits=False)
            case Kind.CUT_REDIS:
                with contextlib.suppress(redis.exceptions.RedisError):
                    await pipeline.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            case Kind.HANG_REDIS:
                async with self._own_redis:
                    self._server.pause()
                    await asyncio.sleep(lasts_s)
                    self._server.resume()
            case Kind.RESTART_REDIS:
                async with self._own_redis:
                    self._server.kill()
                    await asyncio.sleep(lasts_s)
                    await asyncio.to_thread(self._server.start)
            case Kind.FLUSH_REDIS:
                with contextlib.suppress(redis.exceptions.RedisError):
                    await pipeline.redis.flushall()

    async def _until_another_works(self, worker: str, old: psutil.Process) -> None:
        """Until its successor is in the registry; or it has none, since it was scaled away."""

        async def not_yet() -> str:
            pids = {child.name: child.pid for child in self._pipeline.deployment.children}
            if worker not in pids:
                return ""
            try:
                records = await self._pipeline.workers()
            except redis.exceptions.RedisError as error:
                return repr(error)
            ready = {_pid_of(name) for name, record in records.items() if record["state"] == "ready"}
            return "" if pids[worker] != old.pid and pids[worker] in ready else f"pid {pids[worker]}, ready: {ready}"

        await eventually(not_yet, limit_s=AWAY_LIMIT_S, what=f"new {worker}")

    async def _until_another_serves(self, gateway: str, old: psutil.Process) -> None:
        """Until a new process listens at its port."""
        port = self._pipeline.port + int(gateway.rpartition("-")[2]) - 1

        async def not_yet() -> str:
            if old.is_running():
                return "the old one still runs"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError as error:
                return repr(error)
            writer.close()
            return ""

        await eventually(not_yet, limit_s=AWAY_LIMIT_S, what=f"new {gateway}")

    def _process(self, name: str) -> psutil.Process:
        """Raises NoSuchProcess: scaled away, or about to be started again."""
        pids = {child.name: child.pid for child in self._pipeline.deployment.children}
        return psutil.Process(pids.get(name) or 0)

    async def _requests_of(self, name: str) -> frozenset[str]:
        """By what Redis says now; empty when it doesn't say it soon."""
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                return await self._look(name)
        except (TimeoutError, psutil.NoSuchProcess, redis.exceptions.RedisError):
            return frozenset()

    async def _look(self, name: str) -> frozenset[str]:
        store, key = self._pipeline.redis, self._pipeline.key
        pid = self._process(name).pid
        workers = [raw.decode() for raw in await store.zrange(key("workers"), 0, -1)]
        worker = next((found for found in workers if _pid_of(found) == pid), None)
        if worker is None:  # it is still starting
            return frozenset()
        if name.startswith("prefill"):
            pending = await store.xpending_range(key("prefill"), "prefill", "-", "+", 1000, consumername=worker)
            entries = {entry["message_id"] for entry in pending}
            running = await store.xrange(key("prefill"))
            return frozenset(fields[b"id"].decode() for entry, fields in running if entry in entries)
        open_ids = self._open_ids()
        calls = store.pipeline(transaction=False)
        for request_id in open_ids:
            for gen in range(1, MAX_GENS + 1):
                calls.hget(key(f"req:{request_id}:{gen}"), "decode")
        answers = await calls.execute()
        last = [
            next((raw for raw in reversed(answers[n * MAX_GENS : (n + 1) * MAX_GENS]) if raw), b"")
            for n in range(len(open_ids))
        ]
        return frozenset(
            request_id for request_id, decode in zip(open_ids, last, strict=True) if decode.decode() == worker
        )


def _pid_of(worker_id: str) -> int:
    """Ids are `<role>-<host>-<pid>-<random>`."""
    return int(worker_id.split("-")[-2])


def _engine_of(worker: psutil.Process) -> psutil.Process:
    """Raises NoSuchProcess: it is still starting, or about to end."""
    engines = worker.children()
    if not engines:
        raise psutil.NoSuchProcess(worker.pid)
    return engines[0]


@contextlib.asynccontextmanager
async def _stopped(processes: list[psutil.Process]) -> AsyncIterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
