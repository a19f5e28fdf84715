"""A TCP proxy on loopback, in a thread of its own: what passes can be delayed, held, sliced, reset, or go nowhere.

    with TcpProxy(target) as proxy:       # connect to (proxy.host, proxy.port) instead
        proxy.latency_s = 0.02            # each piece comes so late
        proxy.slice_bytes = 7             # pieces are that small
        proxy.stall(Way.TO_SERVER)        # a black hole: what is sent waits, as TCP keeps what was not acknowledged ...
        proxy.heal()                      # ... and comes now
        proxy.reset()                     # both ends of all connections see a reset
        proxy.half_open()                 # the server has lost them all; clients see nothing, whatever they send

A process that listens on 127.0.0.1 and advertises 127.0.0.2 is reached through a proxy with `host=ADVERTISED`.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import gc
import socket
import struct
import threading
import warnings
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Final, TypeVar

import psutil

ADVERTISED: Final = "127.0.0.2"
"""All of 127/8 is this machine, and no test listens here by itself."""
T = TypeVar("T")

_PIECE_BYTES: Final = 65536
_LIMIT_S: Final = 10.0
Address = tuple[str, int]


class Way(enum.Enum):
    TO_SERVER = "to server"
    TO_CLIENT = "to client"


BOTH: Final = (Way.TO_SERVER, Way.TO_CLIENT)


class _Connection:
    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.client_port = int(client.get_extra_info("peername")[1])
        self.is_dead = False
        """One end has lost it; what the other one sends goes nowhere."""
        self._pids: dict[int, bool] = {}

    def is_of(self, pid: int) -> bool:
        """That process made it. Asked once, while it lives."""
        if pid not in self._pids:
            ports = {connection.laddr.port for connection in psutil.Process(pid).net_connections("tcp")}
            self._pids[pid] = self.client_port in ports
        return self._pids[pid]


class TcpProxy:
    """In front of one address. All methods may be called from any thread but the proxy's own."""

    def __init__(
        self,
        target: Address | Callable[[], Address],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        rewrite: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """`port` 0: any. `rewrite` sees what goes to clients, piece by piece."""
        self.host, self.port = host, port
        self.latency_s = 0.0
        self.slice_bytes = _PIECE_BYTES
        self.num_connections = 0
        self.num_bytes = 0
        """Passed on, both ways."""
        self._target = target if callable(target) else lambda: target
        self._rewrite = rewrite
        self._stalled: dict[Way, int | None] = {}
        """The process whose connections are held; None: all."""
        self._connections: set[_Connection] = set()
        self._ends: set[asyncio.StreamWriter] = set()
        """All that ever were: closed at the end, whatever they still have to say."""
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        self._server = self._call(self._open)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_S)
        self._loop.close()
        with warnings.catch_warnings():  # of a connection that came in this very moment; not in a later test
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

    def stall(self, *ways: Way, pid: int | None = None) -> None:
        """Both ways if none is named. `pid`: only what that process connects, now or later."""
        self._do(lambda: self._stalled.update(dict.fromkeys(ways or BOTH, pid)))

    def heal(self) -> None:
        """Ends `stall`."""
        self._do(self._stalled.clear)

    def reset(self) -> None:
        def cut() -> None:
            for connection in self._connections:
                _abort(connection.client)
                _abort(connection.server)

        self._do(cut)

    def half_open(self, *, gone: Way = Way.TO_SERVER) -> None:
        """All connections of now: one end, the server's or the client's, loses them, the other one isn't told."""

        def lose() -> None:
            for connection in self._connections:
                connection.is_dead = True
                _abort(connection.server if gone is Way.TO_SERVER else connection.client)

        self._do(lose)

    def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(_LIMIT_S)

    def _do(self, change: Callable[[], None]) -> None:
        async def call() -> None:
            change()
            told, self._changed = self._changed, asyncio.Event()
            told.set()

        self._call(call)

    async def _open(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, self.host, self.port)

    async def _close(self) -> None:
        self._server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # also those that accept at this moment
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(others, timeout=_LIMIT_S)
        for end in self._ends:
            _abort(end)
        await asyncio.sleep(0)  # their sockets are closed in the loop's next turn

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends.add(writer)
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection(*self._target())
        except OSError:
            _abort(writer)  # nobody listens there: nobody does here
            return
        self._ends.add(server_writer)
        self.num_connections += 1
        connection = _Connection(writer, server_writer)
        self._connections.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(connection, Way.TO_SERVER, reader, server_writer))
                group.create_task(self._pump(connection, Way.TO_CLIENT, server_reader, writer))
        finally:
            self._connections.discard(connection)
            for end in (writer, server_writer):
                end.close()

    async def _pump(
        self, connection: _Connection, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Until the end of the stream has been passed on, or either end is gone."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(self.slice_bytes):
                if self.latency_s:
                    await asyncio.sleep(self.latency_s)
                await self._until_it_flows(connection, way)
                if connection.is_dead:
                    continue
                self.num_bytes += len(data)
                writer.write(self._rewrite(data) if way is Way.TO_CLIENT else data)
                await writer.drain()
        await self._until_it_flows(connection, way)
        if connection.is_dead:
            return
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _until_it_flows(self, connection: _Connection, way: Way) -> None:
        while way in self._stalled and not connection.is_dead:
            pid = self._stalled[way]
            if pid is not None and not connection.is_of(pid):
                return
            await self._changed.wait()


def _abort(writer: asyncio.StreamWriter) -> None:
    """The other end sees a reset."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
