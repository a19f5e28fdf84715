"""Links to side channels of many peers, opened on first use; the one unused longest is closed first."""

from __future__ import annotations

from typing import Final

import structlog

from connector.side_channel import Request, SideMessage, codec
from pdq.wire.blocking import BlockingLink, Hub

log = structlog.get_logger(__name__)

_MAX_LINKS: Final = 256
_IDLE_S: Final = 300.0
"""A link unused for so long is closed: its peer may be gone for good, and ZeroMQ would try for ever."""


class SideLinks:
    """Belongs to the thread that waits on the hub."""

    def __init__(self, hub: Hub, *, identity: str) -> None:
        self._hub = hub
        self._identity = identity
        self._codec = codec()
        self._links: dict[str, tuple[BlockingLink[SideMessage], float]] = {}
        """(link, last use), least recently used first."""

    def send(self, endpoint: str, message: Request, now: float) -> None:
        """One way; what gets lost is repeated by whoever waits for the answer."""
        link, _ = self._links.pop(endpoint, (None, 0.0))
        if link is None:
            try:
                link = BlockingLink(self._codec, endpoint, identity=self._identity)
            except OSError as exc:
                log.warning("kv_link_failed", peer=endpoint, cause=str(exc))
                return
            self._hub.add(link)
            if len(self._links) >= _MAX_LINKS:
                self._close(next(iter(self._links)))
        self._links[endpoint] = link, now
        link.send(message)

    def close_idle(self, now: float) -> None:
        while self._links and next(iter(self._links.values()))[1] + _IDLE_S < now:
            self._close(next(iter(self._links)))

    def close(self) -> None:
        for endpoint in list(self._links):
            self._close(endpoint)

    def _close(self, endpoint: str) -> None:
        link, _ = self._links.pop(endpoint)
        self._hub.remove(link)
        link.close()
