"""uvicorn on a socket of our own, without its signal handlers and logs: `run_role` has both."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from pdq.runtime.errors import StartupError

_KEEP_ALIVE_S = 75
"""Idle client connections: longer than the 60 s of common connection pools, so that the client is first to close."""


class HttpServer:
    def __init__(self, app: ASGIApp, *, host: str, port: int, unread_s: float) -> None:
        """Binds at once. Raises StartupError.

        `unread_s`: a client that takes nothing for so long is disconnected.
        """
        self._socket = _bind(host, port)
        # Accepted sockets inherit it. The system counts, also for a peer that is gone: no timer here.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unread_s * 1000))
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=4096,
        )
        self._server = _Server(config)
        name = "127.0.0.1" if host in ("0.0.0.0", "*", "") else "::1" if host == "::" else host
        bound = self._socket.getsockname()[1]
        self.url = f"http://[{name}]:{bound}" if ":" in name else f"http://{name}:{bound}"

    async def serve(self) -> None:
        """Until `stop`, and then until the last answer is written."""
        await self._server.serve(sockets=[self._socket])

    async def started(self) -> None:
        """Returns once connections are accepted."""
        await self._server.is_up.wait()

    def stop(self) -> None:
        """Accepts no more connections; those that wait for an answer get it."""
        self._server.should_exit = True

    def close(self) -> None:
        self._socket.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("" if bare == "*" else bare, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise StartupError(f"port {port} on {host} (--http-port) can't be used: {error}") from error
    return listener
