"""The test's side: workers of its own, which join a running deployment and stop where the test wants them to.

    async with staged(pipeline, folder) as stage:
        doomed = await stage.start("prefill", stops_at=["claimed"])
        asking = stage.ask(...)
        stop = await doomed.reached("claimed")       # held there; heartbeats and renewals go on
        doomed.kill()                                # or suspend() ... resume(), stop.go()

A worker is held at each of its points, every time, until `go`; `let(point)` lets it pass there from now on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from pdq.cli.role_commands import RoleCommands
from pdq.runtime.child import command_of_child
from tests.faults.points import Points
from tests.pipeline import process_logs
from tests.pipeline.harness import Pipeline, eventually
from tests.pipeline.ledger import Ledger, Line

REACH_LIMIT_S = 60.0
START_LIMIT_S = 150.0
END_LIMIT_S = 60.0


@dataclass(slots=True, eq=False)
class Stop:
    """A worker that stands at a point."""

    point: str
    about: str
    """The request, where one is known."""
    writer: asyncio.StreamWriter

    def go(self, word: str = "go") -> None:
        """Idempotent; also when it is dead. `word`: of `ports.StoppableTransport`, at a point half-way."""
        with contextlib.suppress(OSError):
            self.writer.write(word.encode() + b"\n")
            self.writer.close()


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process. It is not started again when it ends."""

    name: str
    role: str
    process: asyncio.subprocess.Process
    log_dir: Path
    holds: set[str]
    stops: list[Stop] = field(default_factory=list)

    @property
    def worker_id(self) -> str:
        """In the registry; known once it serves."""
        return str(process_logs.events(self.log_dir, "ready", self.name)[0]["worker_id"])

    @property
    def engine_pid(self) -> int:
        (engine,) = psutil.Process(self.process.pid).children()
        return engine.pid

    def stands_at(self, point: str) -> bool:
        return any(stop.point == point for stop in self.stops)

    async def reached(self, point: str) -> Stop:
        """Waits until it stands there. The same stop is returned again until it was let go."""

        async def elsewhere() -> str:
            return "" if self.stands_at(point) else f"it stands at {[stop.point for stop in self.stops]}"

        await eventually(elsewhere, limit_s=REACH_LIMIT_S, what=f"{self.name} at {point!r}")
        return next(stop for stop in self.stops if stop.point == point)

    def go(self, stop: Stop, word: str = "go") -> None:
        self.stops.remove(stop)
        stop.go(word)

    def let(self, *points: str) -> None:
        """Passes these points from now on; none named: all."""
        points = points or tuple(self.holds)
        self.holds.difference_update(points)
        for stop in [stop for stop in self.stops if stop.point in points]:
            self.go(stop)

    def hold(self, point: str) -> None:
        """Again, after `let`."""
        self.holds.add(point)

    def kill(self) -> None:
        """-9, of the role's process; its engine follows."""
        self.process.kill()

    async def killed(self) -> None:
        """As `kill`; returns when its engine has followed, and moves no byte any more."""
        engine = psutil.Process(self.engine_pid)
        self.kill()

        async def alive() -> str:
            with contextlib.suppress(psutil.NoSuchProcess):
                return "" if engine.status() == psutil.STATUS_ZOMBIE else "it lives"
            return ""

        await eventually(alive, limit_s=REACH_LIMIT_S, what="death of the engine")

    def suspend(self) -> None:
        """SIGSTOP, engine included."""
        for pid in (self.process.pid, self.engine_pid):
            os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in (self.engine_pid, self.process.pid):
            os.kill(pid, signal.SIGCONT)

    async def ended(self) -> int:
        """Its exit code; minus the signal."""
        async with asyncio.timeout(END_LIMIT_S):
            return await self.process.wait()


class Stage:
    def __init__(self, pipeline: Pipeline, log_dir: Path, port: int) -> None:
        self.pipeline = pipeline
        self.log_dir = log_dir
        self.workers: list[Worker] = []
        self.allowed_faults: tuple[str, ...] = ()
        """Events or texts at level error in the workers' logs that the test provokes."""
        self._port = port

    @property
    def mode(self) -> str:
        """`pull` or `push`."""
        return self.pipeline.deployment.settings.served_model.mode

    async def late(self, asking: Iterable[asyncio.Task[Line]], limit_s: float) -> list[str]:
        """Names of the requests without an answer after `limit_s`; says how long the slowest of the others took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        asking = list(asking)
        _, pending = await asyncio.wait(asking, timeout=limit_s)
        print(f"{len(asking) - len(pending)} of {len(asking)} answered {loop.time() - began:.2f} s later")
        return [task.get_name() for task in pending]

    async def any_reached(self, point: str, among: Iterable[Worker]) -> Worker:
        """Waits until one of these workers stands there."""
        workers = list(among)

        async def nobody() -> str:
            return "" if any(worker.stands_at(point) for worker in workers) else "nobody"

        await eventually(nobody, limit_s=REACH_LIMIT_S, what=f"worker at {point!r}")
        return next(worker for worker in workers if worker.stands_at(point))

    async def streaming(self, ledger: Ledger) -> None:
        """Waits until each client has read some tokens, of one request at least."""

        async def too_few() -> str:
            shortest = min((len(line.text) for line in ledger.lines), default=0)
            return "" if shortest > 10 else f"{shortest} tokens"

        await eventually(too_few, limit_s=REACH_LIMIT_S, what="streams under way")

    async def nothing_pending(self) -> None:
        """Waits until no job is queued or leased."""

        async def pending() -> str:
            entries = await self.pipeline.redis.xlen(self.pipeline.key("prefill"))
            return f"{entries} entries" if entries else ""

        await eventually(pending, limit_s=REACH_LIMIT_S, what="empty queue")

    async def no_more_takes(self, worker: Worker) -> None:
        """Of an idle prefill worker: waits until it stands before its next take, so that none is under way."""
        worker.hold("before take")
        await self.pipeline.redis.xadd(self.pipeline.key("wake"), {"why": "a test"}, maxlen=1)
        await worker.reached("before take")

    async def taken(self, worker: Worker) -> None:
        """Waits until it stands at `claimed`, and lets it go on with that job; it stands before its next take then."""
        await worker.reached("claimed")
        worker.hold("before take")
        worker.let("claimed")

    async def start(self, role: str, *flags: str, stops_at: Iterable[str] = ()) -> Worker:
        """`role`: prefill or decode. Returns when it serves."""
        worker = await self.spawn(role, *flags, stops_at=stops_at)
        await self.serving(worker)
        return worker

    async def spawn(self, role: str, *flags: str, stops_at: Iterable[str] = ()) -> Worker:
        """As `start`, without the wait."""
        number = sum(worker.role == role for worker in self.workers) + 1
        name = f"{role}-{number}"
        points = Points(port=self._port, worker=name, names=tuple(stops_at))
        deployment = self.pipeline.deployment
        commands = RoleCommands(deployment.settings, redis_url=deployment.redis_url, role_flags=flags)
        own_flags = commands.worker(role)[3:]
        command = [sys.executable, "-m", "tests.faults.worker_process", role, points.as_argument(), *own_flags]
        with (self.log_dir / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command_of_child(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.pipeline.environ),
                start_new_session=True,
            )
        worker = Worker(name, role, process, self.log_dir, set(points.names))
        self.workers.append(worker)
        return worker

    async def serving(self, *workers: Worker) -> None:
        async def not_ready() -> str:
            dead = [worker.name for worker in workers if worker.process.returncode is not None]
            assert not dead, f"{dead} ended before they served"
            waiting = [w.name for w in workers if not process_logs.events(self.log_dir, "ready", w.name)]
            return f"waiting for {waiting}" if waiting else ""

        await eventually(not_ready, limit_s=START_LIMIT_S, what="workers that serve")

    async def ready(self) -> None:
        """Waits until the gateway has found a worker of each role."""

        async def missing() -> str:
            try:
                response = await self.pipeline.client.get("/ready")
            except httpx.HTTPError as error:
                return repr(error)
            return "" if response.status_code == 200 else response.text

        await eventually(missing, limit_s=START_LIMIT_S, what="gateway that is ready")

    async def on_report(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, point, about, _pid = json.loads(await reader.readline())
        worker = next(worker for worker in self.workers if worker.name == name)
        stop = Stop(point, about, writer)
        if point in worker.holds:
            worker.stops.append(stop)
        else:
            stop.go()

    async def drain(self) -> None:
        """Every worker that still lives is told to stop, and must end by itself, without a fault."""
        alive = [worker for worker in self.workers if worker.process.returncode is None]
        for worker in alive:
            worker.let()
            worker.process.terminate()
        codes = {worker.name: await worker.ended() for worker in alive}
        assert not any(codes.values()), f"exit codes {codes}"

    def kill(self) -> None:
        for worker in self.workers:
            worker.let()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def staged(pipeline: Pipeline, log_dir: Path) -> AsyncIterator[Stage]:
    """The stage of one test, with a folder for its logs. Kills what is left of its workers at the end."""
    stage: Stage
    server = await asyncio.start_server(lambda *streams: stage.on_report(*streams), "127.0.0.1", 0)
    stage = Stage(pipeline, log_dir, server.sockets[0].getsockname()[1])
    try:
        yield stage
    finally:
        stage.kill()
        server.close()
