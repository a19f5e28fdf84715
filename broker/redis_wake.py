"""Sleeping until work comes: a blocking read on a connection of its own, which takes nothing from the queue.

XREAD without a group watches two streams: the queue (a job was added) and `wake` (jobs came back by give back or reap).
It reads from the ids that the last empty take saw in the same instant, so nothing is missed between take and sleep.
The reading task goes on when a sleeper is cancelled or its time is up; the connection never has a stray reply on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError

from broker.errors import QueueUnavailable
from broker.redis_calls import RedisCalls
from broker.redis_client import Backoff, ask
from broker.redis_errors import unavailable
from broker.redis_replies import newest_ids

_START = "0-0"


class WakeReader:
    """One per queue object; the task starts with the first sleeper."""

    def __init__(self, calls: RedisCalls, streams: tuple[str, ...]) -> None:
        self._settings = calls.settings
        self._connector = calls.connector
        self._backoff = Backoff(calls.settings)
        self._ids = dict.fromkeys(streams, _START)
        self._sleepers: set[asyncio.Future[bool]] = set()
        self._has_sleepers = asyncio.Event()
        self._is_more_waiting = False
        self._connection: AbstractConnection | None = None
        self._task: asyncio.Task[None] | None = None

    def saw(self, newest: Mapping[str, str], *, is_more_waiting: bool) -> None:
        """After a take: the newest ids of that instant, and whether it left jobs that another take could have."""
        self._ids.update(newest)
        self._is_more_waiting = is_more_waiting

    async def wait(self, timeout_s: float) -> bool:
        """True when something came (rarely although nothing did). Raises QueueUnavailable."""
        if self._is_more_waiting:
            self._is_more_waiting = False
            return True
        if self._task is None:
            self._task = asyncio.create_task(self._read(), name="redis-wake")
        sleeper: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._sleepers.add(sleeper)
        self._has_sleepers.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await sleeper
        except TimeoutError:
            return False
        finally:
            self._sleepers.discard(sleeper)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._wake(QueueUnavailable("the connection to Redis is closing"))
        await self._drop_connection()

    async def _read(self) -> None:
        while True:
            await self._has_sleepers.wait()
            if not self._sleepers:
                self._has_sleepers.clear()
                continue
            try:
                connection = await self._connected()
                reply = await self._blocking_read(connection)
            except (RedisError, OSError, QueueUnavailable) as exc:  # OSError includes TimeoutError
                self._backoff.failed()
                await self._drop_connection()
                self._wake(unavailable(exc, self._connector.where))
                continue
            self._backoff.succeeded()
            fresh = {name: entry for name, entry in newest_ids(reply).items() if _is_newer(entry, self._ids[name])}
            if fresh and self._sleepers:  # with nobody to tell, the ids stay: the next sleeper shall hear of it
                self._ids.update(fresh)
                self._wake(True)

    async def _blocking_read(self, connection: AbstractConnection) -> object:
        block_s = self._settings.redis_block_s
        command = ("XREAD", "BLOCK", max(1, int(block_s * 1000)), "COUNT", 1, "STREAMS")
        async with asyncio.timeout(block_s + self._settings.redis_timeout_s):
            return await ask(connection, *command, *self._ids.keys(), *self._ids.values())

    async def _connected(self) -> AbstractConnection:
        if self._connection is not None:
            with contextlib.suppress(RedisError, OSError):
                if self._connection.is_connected and not await self._connection.can_read():
                    return self._connection
            await self._drop_connection()
        await self._backoff.wait()
        self._connection = await self._connector.open()
        return self._connection

    async def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)

    def _wake(self, outcome: bool | QueueUnavailable) -> None:
        for sleeper in self._sleepers:
            if sleeper.done():
                continue
            if isinstance(outcome, QueueUnavailable):
                sleeper.set_exception(type(outcome)(str(outcome)))
            else:
                sleeper.set_result(outcome)
        self._sleepers.clear()


def _is_newer(entry: str, seen: str) -> bool:
    return _parts(entry) > _parts(seen)


def _parts(entry: str) -> tuple[int, int]:
    ms, _, seq = entry.partition("-")
    return int(ms), int(seq or 0)
