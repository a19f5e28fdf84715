"""Links to side channels of many peers, opened on first use; the one unused longest is closed first."""

from __future__ import annotations

from typing import Final

import structlog

from connector.side_channel import Request, SideMessage, codec
from pdq.wire.blocking import BlockingLink, Hub

log = structlog.get_logger(__name__)

_MAX_LINKS: Final = 256


class SideLinks:
    """Belongs to the thread that waits on the hub."""

    def __init__(self, hub: Hub, *, identity: str) -> None:
        self._hub = hub
        self._identity = identity
        self._codec = codec()
        self._links: dict[str, BlockingLink[SideMessage]] = {}
        """Least recently used first."""

    def send(self, endpoint: str, message: Request) -> None:
        """One way; what gets lost is repeated by whoever waits for the answer."""
        link = self._links.pop(endpoint, None)
        if link is None:
            try:
                link = BlockingLink(self._codec, endpoint, identity=self._identity)
            except OSError as exc:
                log.warning("kv_link_failed", peer=endpoint, cause=str(exc))
                return
            self._hub.add(link)
            if len(self._links) >= _MAX_LINKS:
                oldest = self._links.pop(next(iter(self._links)))
                self._hub.remove(oldest)
                oldest.close()
        self._links[endpoint] = link
        link.send(message)

    def close(self) -> None:
        for link in self._links.values():
            self._hub.remove(link)
            link.close()
        self._links.clear()
