"""Links to side channels of many peers, opened on first use; the one unused longest is closed first.

Every message asks for an answer. When none has come for a while the connection may be half open (the other end has lost
it, and nobody says so): the next repeat goes over a new one, long before ZeroMQ's heartbeat gives the old one up. The
peer may also be slow: what it answers over the old one is heard for as long as anybody waits for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import structlog

from connector.settings import ConnectorSettings
from connector.side_channel import Request, SideMessage, codec
from pdq.wire.blocking import BlockingLink, Hub

log = structlog.get_logger(__name__)

_MAX_LINKS: Final = 256
_SILENT_ANSWERS: Final = 3
"""Fewer than the tries that a message has, so that the last ones go over another connection."""
_IDLE_S: Final = 60.0
"""A link unused for so long is closed: its peer may be gone for good, and ZeroMQ would try for ever."""


@dataclass(slots=True)
class _Open:
    link: BlockingLink[SideMessage]
    used_at: float
    asked_at: float | None = None
    """Since when nothing was heard although something was asked."""


class SideLinks:
    """Belongs to the thread that waits on the hub. `now` is time.monotonic()."""

    def __init__(self, hub: Hub, settings: ConnectorSettings, *, identity: str) -> None:
        self._hub = hub
        self._identity = identity
        self._silent_s = _SILENT_ANSWERS * settings.kv_answer_s
        self._wait_s = settings.kv_answer_tries * settings.kv_answer_s
        self._codec = codec()
        self._links: dict[str, _Open] = {}
        """Least recently used first."""
        self._replaced: deque[tuple[float, BlockingLink[SideMessage]]] = deque()
        """Only heard, until then."""

    def send(self, endpoint: str, message: Request, now: float) -> None:
        """One way; what gets lost is repeated by whoever waits for the answer."""
        open_link = self._links.get(endpoint)
        if open_link is not None and open_link.asked_at is not None and now - open_link.asked_at > self._silent_s:
            log.info("kv_link_silent", peer=endpoint, seconds=round(now - open_link.asked_at, 3))
            del self._links[endpoint]
            self._replaced.append((now + self._wait_s, open_link.link))
        open_link = self._links.pop(endpoint, None) or self._new(endpoint, now)
        if open_link is None:
            return
        self._links[endpoint] = open_link
        open_link.used_at = now
        open_link.asked_at = now if open_link.asked_at is None else open_link.asked_at
        open_link.link.send(message)

    def receive(self, link: BlockingLink[SideMessage]) -> list[SideMessage]:
        """What is there now on one of these links, or on one that was replaced."""
        messages = [message for message, _ in link.receive()]
        open_link = self._links.get(link.endpoint)
        if messages and open_link is not None:
            open_link.asked_at = None
        return messages

    def close_idle(self, now: float) -> None:
        while self._links and next(iter(self._links.values())).used_at + _IDLE_S < now:
            self._close(next(iter(self._links)))
        while self._replaced and (self._replaced[0][0] <= now or len(self._replaced) > _MAX_LINKS):
            self._shut(self._replaced.popleft()[1])

    def close(self) -> None:
        for endpoint in list(self._links):
            self._close(endpoint)
        for _, link in self._replaced:
            self._shut(link)
        self._replaced.clear()

    def _new(self, endpoint: str, now: float) -> _Open | None:
        try:
            link = BlockingLink(self._codec, endpoint, identity=self._identity)
        except OSError as exc:
            log.warning("kv_link_failed", peer=endpoint, cause=str(exc))
            return None
        self._hub.add(link)
        if len(self._links) >= _MAX_LINKS:
            self._close(next(iter(self._links)))
        return _Open(link, now)

    def _close(self, endpoint: str) -> None:
        self._shut(self._links.pop(endpoint).link)

    def _shut(self, link: BlockingLink[SideMessage]) -> None:
        self._hub.remove(link)
        link.close()
