"""A worker's side of a stop: at a named point it reports to the test, and goes on when the test says so.

Points of a role's process (`ports.py`); `<Notice>` is the kind of a message: `Reserve`, `KvReady`, `Admit`, ...

    before take | claimed | before renew | before settle | after settle | before give back
    before <Notice> | after <Notice>            around a question to another process and its answer

Points of its engine's process:

    computing | decoding                        in mid step, between two layers: with, without a prefill in it
    half read | read | half written | written   of one call of the KV transport
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Where one worker stops. Crosses to its processes as one argument."""

    port: int
    """Where the test listens, on this machine."""
    worker: str
    names: tuple[str, ...]

    @classmethod
    def from_argument(cls, argument: str) -> Points:
        fields = json.loads(argument)
        return cls(**{**fields, "names": tuple(fields["names"])})

    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    async def at(self, point: str, about: str = "") -> None:
        """Holds this task, nothing else of the process."""
        if point not in self.names:
            return
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(self._report(point, about))
            await reader.readline()
        finally:
            writer.close()

    def at_blocking(self, point: str, about: str = "") -> str:
        """Holds this thread. The test's word: `go`, or what else it wants to happen there."""
        if point not in self.names:
            return "go"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(self._report(point, about))
            return connection.recv(16).decode().strip()

    def _report(self, point: str, about: str) -> bytes:
        return json.dumps([self.worker, point, about, os.getpid()]).encode() + b"\n"
