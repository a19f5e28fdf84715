"""All short Redis calls of a process, by one task on one connection: the calls of a loop turn travel together.

A caller puts its command into a list and waits for its own future. The task sends what has gathered as one pipeline and
reads as many replies; meanwhile new calls gather. So a caller that is cancelled can't shift anybody's reply, and a call
costs a third of one that goes alone.

A call that fails has an unknown outcome: it may have run. Nothing is repeated here, save where the server has said that
it did not run: NOSCRIPT (the script is loaded) and NOGROUP (the group is made; our scripts meet it before they write).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

import structlog
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from broker.errors import QueueMisconfigured, QueueUnavailable
from broker.redis_client import Backoff, Connector, MasterConnector, RedisSettings
from broker.redis_errors import code_of, is_stale, unavailable
from broker.scripts import Script, script

_log = structlog.get_logger(__name__)

Argument = str | bytes | int
_MAX_REPAIRS: Final = 3


class _Call:
    """One command under way. `group` is (stream, group) when a missing group may be made."""

    __slots__ = ("command", "future", "group", "script")

    def __init__(self, command: tuple[Argument, ...], script: Script | None, group: tuple[str, str] | None) -> None:
        # Encoded here, so that text which is no text fails its own caller and nobody else.
        self.command = tuple(part if isinstance(part, bytes) else str(part).encode() for part in command)
        self.script = script
        self.group = group
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def fail(self, error: QueueUnavailable) -> None:
        if not self.future.done():
            self.future.set_exception(type(error)(str(error)))

    def answer(self, reply: object) -> None:
        if not self.future.done():
            self.future.set_result(reply)

    def repair(self, error: ResponseError) -> tuple[Argument, ...] | None:
        """The command after which this call may be sent again; None when the error stands."""
        code = code_of(error)
        if code == "NOSCRIPT" and self.script is not None:
            return ("SCRIPT", "LOAD", self.script.text)
        if code == "NOGROUP" and self.group is not None:
            return ("XGROUP", "CREATE", *self.group, "0", "MKSTREAM")
        return None


class RedisCalls:
    """Shared by the queue and the registry of a process; whoever made it closes it. Connects at the first call."""

    def __init__(
        self, settings: RedisSettings, *, connector: Connector | None = None, client_name: str = "pdq"
    ) -> None:
        """`connector` is for tests with a server inside the process."""
        self.settings = settings
        self.connector: Connector = connector or MasterConnector(settings, client_name=client_name)
        self._backoff = Backoff(settings)
        self._connection: AbstractConnection | None = None
        self._waiting: list[_Call] = []
        self._has_calls = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Connects and checks the server now. Raises QueueUnavailable, or QueueMisconfigured: a reason to exit."""
        await self.call("PING")

    async def start_when_reachable(self) -> None:
        """As `start`, but waits for a server that is down or loading. Raises QueueMisconfigured only."""
        while True:
            try:
                return await self.start()
            except QueueMisconfigured:
                raise
            except QueueUnavailable as exc:
                _log.warning("waiting_for_redis", error=str(exc))

    async def call(self, *command: Argument) -> Any:
        """The raw reply. Raises QueueUnavailable."""
        return await self.submit(command)

    async def run(
        self, name: str, keys: Sequence[str], args: Sequence[Argument], *, group: tuple[str, str] | None = None
    ) -> Any:
        """The raw reply of the script `lua/<name>.lua`. Raises QueueUnavailable."""
        return await self.submit_script(name, keys, args, group=group)

    def submit_script(
        self, name: str, keys: Sequence[str], args: Sequence[Argument], *, group: tuple[str, str] | None = None
    ) -> asyncio.Future[Any]:
        """As `run`, for a caller that must see the reply even when it is cancelled itself."""
        code = script(name)
        return self.submit(("EVALSHA", code.sha, len(keys), *keys, *args), code, group)

    def submit(
        self, command: tuple[Argument, ...], script: Script | None = None, group: tuple[str, str] | None = None
    ) -> asyncio.Future[Any]:
        call = _Call(command, script, group)
        if self._is_closed:
            call.fail(QueueUnavailable("this process has closed its connection to Redis"))
            return call.future
        if self._task is None:
            self._task = asyncio.create_task(self._serve(), name="redis-calls")
        self._waiting.append(call)
        self._has_calls.set()
        return call.future

    async def close(self) -> None:
        """Calls under way fail; may be called twice."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._fail(self._gathered(all_of_them=True), QueueUnavailable("the connection to Redis is closing"))
        await self._drop_connection()

    async def _serve(self) -> None:
        while True:
            await self._has_calls.wait()
            batch = self._gathered()
            if not batch:
                continue
            try:
                connection = await self._connected(batch)
                if connection is not None:
                    await self._exchange(connection, batch)
            except (RedisError, OSError) as exc:  # OSError includes TimeoutError
                await self._drop_connection()
                self._fail(batch, unavailable(exc, self.connector.where))
            except asyncio.CancelledError:
                self._fail(batch, QueueUnavailable("the connection to Redis is closing"))
                raise
            except Exception as exc:  # noqa: BLE001 - whatever it was, later calls must not wait for ever
                _log.exception("redis_exchange_crashed")
                await self._drop_connection()
                self._fail(batch, QueueUnavailable(f"exchange with Redis at {self.connector.where} crashed: {exc!r}"))

    def _gathered(self, *, all_of_them: bool = False) -> list[_Call]:
        limit = len(self._waiting) if all_of_them else self.settings.redis_batch_max
        batch, self._waiting = self._waiting[:limit], self._waiting[limit:]
        if not self._waiting:
            self._has_calls.clear()
        return [call for call in batch if not call.future.done()]

    async def _connected(self, batch: list[_Call]) -> AbstractConnection | None:
        """A connection that the server has not closed, or None after all calls were failed."""
        if self._connection is not None:
            with contextlib.suppress(RedisError, OSError):
                if self._connection.is_connected and not await self._connection.can_read():
                    return self._connection
            await self._drop_connection()
        await self._backoff.wait()
        try:
            self._connection = await self.connector.open()
        except QueueUnavailable as exc:
            self._backoff.failed()
            self._fail(batch + self._gathered(all_of_them=True), exc)
            return None
        self._backoff.succeeded()
        return self._connection

    async def _exchange(self, connection: AbstractConnection, calls: list[_Call]) -> None:
        is_wrong_server = False
        for _ in range(_MAX_REPAIRS):
            again: list[_Call] = []
            repairs: dict[tuple[Argument, ...], None] = {}
            for call, reply in zip(calls, await self._roundtrip(connection, [c.command for c in calls]), strict=True):
                if not isinstance(reply, ResponseError):
                    call.answer(reply)
                elif (repair := call.repair(reply)) is not None:
                    again.append(call)
                    repairs[repair] = None
                else:
                    is_wrong_server |= is_stale(reply)
                    call.fail(unavailable(reply, self.connector.where))
            if not again:
                break
            await self._roundtrip(connection, list(repairs))  # BUSYGROUP: somebody was faster
            calls = again
        self._fail(calls, QueueUnavailable(f"Redis at {self.connector.where} forgets scripts or groups at once"))
        if is_wrong_server:
            await self._drop_connection()

    async def _roundtrip(self, connection: AbstractConnection, commands: list[tuple[Argument, ...]]) -> list[Any]:
        replies: list[Any] = []
        async with asyncio.timeout(self.settings.redis_timeout_s):
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            for _ in commands:
                try:
                    replies.append(await connection.read_response(disable_decoding=True))
                except ResponseError as exc:
                    replies.append(exc)
        return replies

    async def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)

    @staticmethod
    def _fail(calls: list[_Call], error: QueueUnavailable) -> None:
        for call in calls:
            call.fail(error)
