"""Who was told Busy: they are told Room, once, when blocks come back."""

from __future__ import annotations

from broker.links import NoticePeers
from broker.messages import Room


class RoomWaiters:
    def __init__(self, worker_id: str, peers: NoticePeers) -> None:
        self._worker_id = worker_id
        self._peers = peers
        self._waiters: dict[str, None] = {}
        """Inbox endpoints of prefill workers, in the order in which they were refused."""

    def add(self, prefill_endpoint: str) -> None:
        self._waiters[prefill_endpoint] = None

    def tell(self, free_tokens: int) -> None:
        """All of them: they ask again, and placement decides who comes first. A lost one asks by itself later."""
        waiters, self._waiters = self._waiters, {}
        for endpoint in waiters:
            self._peers.send(endpoint, Room(worker=self._worker_id, free_tokens=free_tokens))
