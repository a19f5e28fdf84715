"""Lets a Transfer Engine end in milliseconds.

Its destructor joins a thread that sleeps in accept() for up to a second, and holds the GIL meanwhile: the engine loop
would stand still. So that thread is given a short accept timeout, and one connection that makes it take notice.
Nothing depends on this but the time: where it doesn't work, the destructor takes its second.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct

_ACCEPT_TIMEOUT = struct.pack("ll", 0, 1000)  # timeval: 1 ms
_CONNECT_TIMEOUT_S = 0.2


def hasten_exit(host: str, port: int) -> None:
    """`port`: where this process's Transfer Engine listens for handshakes. To be followed by its destruction."""
    with contextlib.suppress(OSError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            if _shorten(fd, port):
                socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
                return


def listening_ports() -> set[int]:
    """Of all TCP sockets of this process."""
    ports = set()
    with contextlib.suppress(OSError):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError, IndexError):
                if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                    continue
                listener = socket.socket(fileno=fd)
                try:
                    if listener.family != socket.AF_UNIX and listener.getsockopt(
                        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                    ):
                        ports.add(int(listener.getsockname()[1]))
                finally:
                    listener.detach()
    return ports


def _shorten(fd: int, port: int) -> bool:
    """True: this was the listening socket of that port. Only looked at, never owned or doubled."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        listener = socket.socket(fileno=fd)
    except OSError:
        return False  # closed meanwhile
    try:
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or listener.getsockname()[1] != port:
            return False
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _ACCEPT_TIMEOUT)
    except (OSError, IndexError):
        return False
    finally:
        listener.detach()
    return True
