"""Side-channel ports that are known before the engine's ranks listen on them, and still free when they do."""

from __future__ import annotations

import random
import socket
from typing import Final

from engine.base import EngineError

_FIRST: Final = 20000
_LAST: Final = 32700
"""Between the ports that Mooncake takes for itself and those that the system gives to outgoing connections."""
_TRIES: Final = 200


class SidePorts:
    """`first`, `first` + 1, ..., one per rank, kept by sockets that are bound but don't listen.

    Another socket with SO_REUSEADDR may listen on them, as ZeroMQ's do; nobody else gets them meanwhile.
    """

    def __init__(self, host: str, num_ranks: int, *, first: int = 0) -> None:
        """`first` 0: any that are free. Raises EngineError."""
        self._sockets: list[socket.socket] = []
        candidates = [first] if first else [random.randrange(_FIRST, _LAST - num_ranks) for _ in range(_TRIES)]
        for candidate in candidates:
            try:
                for port in range(candidate, candidate + num_ranks):
                    self._sockets.append(_bound(host, port))
            except (OSError, OverflowError) as error:
                self.close()
                reason = error
            else:
                self.first = candidate
                return
        wanted = f"{first} to {first + num_ranks - 1}" if first else f"{_FIRST} to {_LAST}"
        raise EngineError(
            f"no {num_ranks} side-channel port(s) on {host} among {wanted} can be used: {reason}"
            " (--side-channel-host, --side-channel-port)"
        ) from reason

    def close(self) -> None:
        for kept in self._sockets:
            kept.close()
        self._sockets.clear()


def _bound(host: str, port: int) -> socket.socket:
    host = host.strip("[]")
    kept = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((host, port))
    except BaseException:
        kept.close()
        raise
    return kept
