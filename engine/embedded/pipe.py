"""The engine process's end of the socket to its worker: messages in frames of 4 bytes length + bytes.

A socket pair, not ZeroMQ: both ends see the other process's death at once, and no name or port exists to reach it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
from typing import Final

from engine.embedded.messages import FromEngine, ToEngine, from_engine_codec, to_engine_codec

LENGTH: Final = struct.Struct("<I")
_UNREAD: Final = struct.Struct("i")
_CHUNK_BYTES: Final = 1 << 16
_MAX_UNSENT_BYTES: Final = 64 << 20


class ParentGone(Exception):
    """The worker process closed its end or died."""


class EnginePipe:
    """Used by the engine's loop thread; only `wake` may be called from others."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decode = to_engine_codec().decode
        self._encode = from_engine_codec().encode
        self._received = bytearray()
        self._unsent = bytearray()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)

    def receive_first(self) -> bytes:
        """The first frame, as bytes. Blocks."""
        while (frame := self._take_frame()) is None:
            self._fill()
        self._socket.setblocking(False)
        return frame

    def wake(self) -> None:
        """Ends a running or the next `receive` at once. Any thread."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: awake already; closed: nobody to wake
            os.write(self._wake_write, b"w")

    def receive(self, timeout_s: float) -> tuple[list[ToEngine], bool]:
        """(messages, somebody called `wake`), at the latest after the time-out. Raises ParentGone."""
        is_awake = False
        self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        for descriptor, events in self._poll.poll(timeout_s * 1000):
            if descriptor == self._wake_read:
                is_awake = True
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            else:
                if events & select.POLLOUT:
                    self._flush()
                if events & ~select.POLLOUT:
                    self._fill()
        messages: list[ToEngine] = []
        while (frame := self._take_frame()) is not None:
            messages.append(self._decode(frame)[0])
        return messages, is_awake

    def send(self, message: FromEngine) -> None:
        """Doesn't wait, unless the worker is 64 MiB behind. Raises ParentGone."""
        data = self._encode(message)
        self._unsent += LENGTH.pack(len(data)) + data
        self._flush()
        while len(self._unsent) > _MAX_UNSENT_BYTES:
            select.select([], [self._socket], [], 1.0)
            self._flush()

    def is_behind(self) -> bool:
        """The worker hasn't yet taken all that was sent."""
        if self._unsent:
            return True
        try:
            return bool(_UNREAD.unpack(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_UNREAD.size)))[0])
        except OSError:
            return False  # not every kernel tells

    def close(self) -> None:
        """Sends what is left, if the worker takes it within a second."""
        with contextlib.suppress(ParentGone, OSError):
            self._socket.settimeout(1.0)
            self._socket.sendall(self._unsent)
        self._socket.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ParentGone(str(error)) from error

    def _fill(self) -> None:
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as error:  # a worker that died without reading all that was sent resets the connection
            raise ParentGone(str(error)) from error
        if not data:
            raise ParentGone("the worker's end is closed")
        self._received += data

    def _take_frame(self) -> bytes | None:
        if len(self._received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._received)
        end = LENGTH.size + length
        if len(self._received) < end:
            return None
        frame = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        return frame
