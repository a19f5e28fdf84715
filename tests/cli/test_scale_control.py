"""`pdq up`'s side of scaling, over real processes that stand in for workers: the test beats for them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from broker.base import WorkerRecord
from broker.redis_calls import RedisCalls
from broker.redis_client import RedisSettings
from broker.redis_registry import RedisRegistry
from broker.redis_scale import RedisScale, ScaleRow, Wish
from broker.registry_settings import RegistrySettings
from pdq.cli.children import BackOff, Child
from pdq.cli.fleet import Fleet
from pdq.cli.run_folder import RunFolder
from pdq.cli.scale_control import ScaleControl
from pdq.runtime.ids import host_name
from tests.broker.stores import PATIENCE, TTL_S
from tests.cli.conftest import LIMIT_S
from tests.cli.operators import lasting_heartbeat
from tests.servers import RedisServer

ROW = "here:/run"
WORKER = ["sleep", "1000"]
BAD_WORKER = ["sh", "-c", "echo can not start: no memory; exit 2"]


class Up:
    """A fleet under control, and the registry in which the test speaks for its workers."""

    def __init__(self, folder: Path, server: RedisServer, own: Wish) -> None:
        self.fleet = Fleet(
            RunFolder(folder),
            environ=os.environ,
            back_off=BackOff(min_s=0.01, max_s=0.01),
            on_change=lambda _: self.control.changed(),
            may_restart=lambda child: self.control.may_restart(child),
            on_cannot_start=lambda child: self.control.on_cannot_start(child),
        )
        self.late_command = WORKER
        self.calls = RedisCalls(RedisSettings(redis=server.url, **PATIENCE))
        self.scale = RedisScale(self.calls, "m", RegistrySettings())
        self.registry = RedisRegistry(self.calls, "m", RegistrySettings(registry_ttl_s=TTL_S))
        self.control = ScaleControl(
            self.fleet,
            redis_url=server.url,
            model="m",
            name=ROW,
            own=own,
            grace_s=LIMIT_S,
            start=lambda role, n: self.fleet.start(f"{role}-{n}", self.late_command, is_vital=False),
        )

    def names(self) -> list[str]:
        return [child.name for child in self.fleet.children if child.pid is not None and not child.is_leaving]

    def child(self, name: str) -> Child:
        return next(child for child in self.fleet.children if child.name == name)

    async def row(self) -> ScaleRow:
        async def row() -> ScaleRow | None:
            return next(iter(await self.scale.rows()), None)

        found: ScaleRow = await until(row)
        return found

    async def ask(self, **numbers: int) -> None:
        row = await self.row()
        assert await self.scale.ask(row, dataclasses.replace(row.wish, **numbers)) is not None

    async def join(self, name: str) -> WorkerRecord:
        """As the worker does."""
        role, pid = name.partition("-")[0], self.child(name).pid
        record = WorkerRecord(
            worker_id=f"{role}-{host_name()}-{pid}-ab",
            role=role,
            state="ready",
            endpoint="",
            model="m",
            fingerprint="",
        )
        await self.beat(record)
        return record

    async def beat(self, record: WorkerRecord) -> bool:
        """In the worker's stead, for TTL_S. True: it is asked to drain."""
        return await lasting_heartbeat(self.calls, self.registry, record)

    async def until_running(self, *names: str) -> None:
        async def is_so() -> bool:
            return self.names() == list(names)

        await until(is_so, what=lambda: f"{names}; there are {self.names()}")


async def until(ask: Callable[[], Awaitable[Any]], what: Callable[[], str] = lambda: "it") -> Any:
    try:
        async with asyncio.timeout(LIMIT_S):
            while not (found := await ask()):  # noqa: ASYNC110 - another process's doing
                await asyncio.sleep(0.02)
            return found
    except TimeoutError as error:
        raise AssertionError(f"did not come: {what()}") from error


@contextlib.asynccontextmanager
async def running(folder: Path, server: RedisServer, *, prefill: int = 1, decode: int = 0) -> AsyncIterator[Up]:
    up = Up(folder, server, Wish(prefill=prefill, decode=decode))
    with RunFolder(folder):
        for role, count in (("prefill", prefill), ("decode", decode)):
            for n in range(1, count + 1):
                up.fleet.start(f"{role}-{n}", WORKER, is_vital=True)
        task = asyncio.create_task(up.control.run())
        try:
            yield up
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await up.control.close()
            assert await up.calls.call("EXISTS", up.scale.keys.scale, up.scale.keys.up(ROW)) == 0
            await up.calls.close()
            await up.fleet.stop((("prefill", "decode"),), LIMIT_S)


async def test_more_are_started_under_the_lowest_free_names(tmp_path: Path, private_redis: RedisServer) -> None:
    async with running(tmp_path, private_redis) as up:
        await up.until_running("prefill-1")
        await up.ask(prefill=3, decode=2)

        await up.until_running("prefill-1", "prefill-2", "prefill-3", "decode-1", "decode-2")


async def test_fewer_the_newest_is_asked_through_the_registry_and_not_signalled(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis, prefill=2) as up:
        await up.until_running("prefill-1", "prefill-2")
        oldest, newest = [await up.join(name) for name in ("prefill-1", "prefill-2")]
        await up.ask(prefill=1)

        await until(lambda: up.beat(newest))
        pid = up.child("prefill-2").pid

        assert not await up.beat(oldest)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)  # as it ends by itself

        async def is_forgotten() -> bool:
            return [child.name for child in up.fleet.children] == ["prefill-1"]

        await until(is_forgotten)


async def test_one_that_still_starts_is_ended_by_signal(tmp_path: Path, private_redis: RedisServer) -> None:
    async with running(tmp_path, private_redis, prefill=2) as up:
        await up.until_running("prefill-1", "prefill-2")
        await up.ask(prefill=1)

        await up.until_running("prefill-1")


async def test_a_worker_drained_by_an_operator_is_not_started_again_and_nobody_else_goes(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis, prefill=3) as up:
        await up.until_running("prefill-1", "prefill-2", "prefill-3")
        records = [await up.join(name) for name in ("prefill-1", "prefill-2", "prefill-3")]
        pid = up.child("prefill-1").pid
        assert pid is not None

        assert await up.scale.drain(records[0], await up.row())
        os.kill(pid, signal.SIGKILL)  # at once, before anybody here has looked

        await up.until_running("prefill-2", "prefill-3")
        for record in records[1:]:
            assert not await up.beat(record)
        assert (await up.row()).wish == Wish(prefill=2, decode=0)


async def test_a_worker_that_left_the_registry_but_runs_on_is_the_one_that_goes(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis, prefill=2) as up:
        await up.until_running("prefill-1", "prefill-2")
        drained, other = [await up.join(name) for name in ("prefill-1", "prefill-2")]

        async def is_known() -> bool:
            return (await up.row()).state.prefill == 2

        await until(is_known)
        await up.calls.call("HSET", up.scale.keys.clock, "since", 0)  # as if Redis had been there for long
        await up.scale.drain(drained, await up.row())
        await up.registry.remove(drained.worker_id)

        async def is_leaving() -> bool:
            return up.child("prefill-1").is_leaving

        await until(is_leaving)
        assert not await up.beat(other)
        up.fleet.kill()  # nobody here would end by itself


async def test_a_killed_worker_comes_back_but_not_when_fewer_are_wanted(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis, prefill=2) as up:
        await up.until_running("prefill-1", "prefill-2")
        first = up.child("prefill-1")
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)

        async def is_back() -> bool:
            return first.restarts == 1 and first.pid is not None

        await until(is_back)
        await up.ask(prefill=1)
        os.kill(first.pid, signal.SIGKILL)

        async def the_right_one_is_left() -> bool:
            if not len(names := up.names()) == len(up.fleet.children) == 1:
                return False
            return up.child(names[0]).restarts == (0 if names == ["prefill-2"] else 2)

        # The wish or the death may be seen first. Then the second one was told to leave, and the first one is back.
        await until(the_right_one_is_left, what=lambda: f"one; there are {up.names()}")


async def test_one_that_can_not_start_is_given_up_and_the_others_stay(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis) as up:
        await up.until_running("prefill-1")
        up.late_command = BAD_WORKER
        await up.ask(prefill=3)

        async def has_problem() -> ScaleRow | None:
            row = await up.row()
            return row if row.state.problem and row.wish.prefill == 1 else None

        row = await until(has_problem)
        assert row is not None
        assert "can't start: can not start: no memory" in row.state.problem
        await up.until_running("prefill-1")
        up.late_command = WORKER
        await up.ask(prefill=2)
        await up.until_running("prefill-1", "prefill-2")

        async def is_forgotten() -> bool:
            return not (await up.row()).state.problem

        await until(is_forgotten)


async def test_without_redis_everything_stays_as_it_is(tmp_path: Path, private_redis: RedisServer) -> None:
    async with running(tmp_path, private_redis, prefill=2) as up:
        await up.until_running("prefill-1", "prefill-2")
        await up.row()
        private_redis.kill()
        child = up.child("prefill-1")
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)

        async def is_back() -> bool:
            return child.restarts == 1 and child.pid is not None

        await until(is_back)
        private_redis.start()
        await up.ask(decode=1)
        await up.until_running("prefill-1", "prefill-2", "decode-1")


@pytest.mark.parametrize("number", [0, 2])
async def test_the_row_says_what_runs(tmp_path: Path, private_redis: RedisServer, number: int) -> None:
    async with running(tmp_path, private_redis, prefill=3) as up:
        await up.until_running("prefill-1", "prefill-2", "prefill-3")
        for n in range(1, number + 1):
            await up.join(f"prefill-{n}")

        async def is_said() -> bool:
            state = (await up.row()).state
            return (state.prefill, state.starting, state.draining) == (number, 3 - number, 0)

        await until(is_said)
