"""Reads a ZeroMQ socket from an asyncio loop, without a thread and without zmq.asyncio.

ZeroMQ's file descriptor is edge-triggered: it announces changes, not states. So receive until nothing is left, and look
again after every send, also a failed one, since it may swallow the announcement. Works on asyncio's loop and on uvloop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

_MAX_PER_PASS: Final = 256
"""Messages received before the loop gets its turn again."""


class Pump:
    """Calls `receive_one` whenever the socket may have something, until it returns False."""

    def __init__(self, socket: zmq.Socket[bytes], receive_one: Callable[[], bool]) -> None:
        self._socket = socket
        self._receive_one = receive_one
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_open = True
        self._loop.add_reader(self._fd, self.drain)
        self._loop.call_soon(self.drain)

    def drain(self) -> None:
        for _ in range(_MAX_PER_PASS):
            if not self._is_open or not self._receive_one():
                return
        self._loop.call_soon(self.drain)

    def look_again(self) -> None:
        """To be called after each send on the socket, whether it worked or not."""
        if self._is_open and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self.drain)

    def stop(self) -> None:
        """Must come before the socket is closed."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._fd)
