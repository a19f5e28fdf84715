"""Messages that wait for an answer: when to send them again, and when to give their peer up. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from connector.side_channel import Request

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Ask:
    endpoint: str
    message: Request
    send_at: float
    tries_left: int


class Asks(Generic[K]):
    """At most one open question per key; a new one replaces the old."""

    def __init__(self, *, every_s: float, tries: int) -> None:
        self._every_s = every_s
        self._tries = tries
        self._open: dict[K, _Ask] = {}

    def __len__(self) -> int:
        return len(self._open)

    def put(self, key: K, endpoint: str, message: Request, now: float) -> None:
        """The next `due` has it for the first time."""
        self._open[key] = _Ask(endpoint, message, now, self._tries)

    def answered(self, key: K) -> bool:
        """False: nothing was open; the answer is late or repeated."""
        return self._open.pop(key, None) is not None

    def due(self, now: float) -> tuple[list[tuple[str, Request]], list[K]]:
        """(endpoint, message) to be sent now, and the keys whose last try found no answer; those are closed."""
        sends: list[tuple[str, Request]] = []
        given_up: list[K] = []
        for key, ask in self._open.items():
            if ask.send_at > now:
                continue
            if ask.tries_left == 0:
                given_up.append(key)
                continue
            ask.tries_left -= 1
            ask.send_at = now + self._every_s
            sends.append((ask.endpoint, ask.message))
        for key in given_up:
            del self._open[key]
        return sends, given_up

    def next_at(self) -> float | None:
        return min((ask.send_at for ask in self._open.values()), default=None)
