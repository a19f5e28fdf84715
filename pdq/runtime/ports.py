"""A process's ports are tried before anything starts: a taken one is named with its setting and its holder.

And free ones are found for the servers that pdq starts by itself.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

import psutil

from pdq.runtime.errors import PortTaken

_OWN: Final = range(20_000, 32_000)
"""Below those that the system gives to outgoing connections: such a one may take a port before its server does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPort:
    """A port that a setting fixes. 0, the system chooses: only the address is tried."""

    host: str
    port: int
    setting: str
    """Name of the setting to change, as in `--http-port`."""


def check_ports(ports: Iterable[FixedPort]) -> None:
    """Binds and listens on all of them for a moment. Raises PortTaken with number, setting and holder."""
    tried: list[FixedPort] = []
    with contextlib.ExitStack() as probes:
        for wanted in ports:
            try:
                probes.enter_context(_listening(wanted))
            except (OSError, OverflowError) as error:
                raise PortTaken(_message(wanted, error, tried)) from error
            tried.append(wanted)


def check_port(wanted: FixedPort) -> None:
    """As `check_ports`, for one."""
    check_ports([wanted])


def _listening(wanted: FixedPort) -> socket.socket:
    host = wanted.host.strip("[]")
    probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server: TIME_WAIT is no obstacle
        probe.bind(("" if host == "*" else host, wanted.port))
        probe.listen(1)
    except BaseException:
        probe.close()
        raise
    return probe


def _message(wanted: FixedPort, error: OSError | OverflowError, tried: list[FixedPort]) -> str:
    where = f"port {wanted.port} on {wanted.host} ({wanted.setting})"
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        twin = next((port.setting for port in tried if port.port == wanted.port), None)
        if twin is not None:
            return f"{where} is this process's {twin} already; choose another {wanted.setting}"
        return f"{where} is taken by {holder_of(wanted.port)}; stop it or choose another {wanted.setting}"
    if getattr(error, "errno", None) == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        setting = wanted.setting.replace("-port", "-host")
        return f"{where} can't be used: {wanted.host} is no address of this machine; choose another {setting}"
    return f"{where} can't be used: {error}; choose another one"


def holder_of(port: int) -> str:
    """`name (pid N): command line` of the process that listens on this port, as far as this user may see it."""
    try:
        listeners = [
            c
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr[1] == port
        ]
        for connection in listeners:
            if connection.pid:
                process = psutil.Process(connection.pid)
                return f"{process.name()} (pid {process.pid}): {' '.join(process.cmdline()).strip()[:120]}"
    except psutil.Error:
        pass
    return "a process that this user can't see"


def free_port(*, besides: Collection[int] = ()) -> int:
    """A TCP port of loopback that was free a moment ago, for a server that pdq starts itself. Not one of `besides`."""
    while True:
        port = secrets.choice(_OWN)
        if port in besides:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
