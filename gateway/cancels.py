"""Tells workers to stop: Cancel notices, each (request, pair) at most once a second to the same worker."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from broker.errors import PeerUnavailable
from broker.links import NoticePeers
from broker.messages import Cancel
from gateway.metrics import GatewayMetrics
from pdq.runtime.background import Background
from pdq.wire.types import Pair

ANY_ATTEMPT: Final = 2**31 - 1
_REPEAT_S: Final = 1.0
log = structlog.get_logger(__name__)


class Cancels:
    def __init__(self, peers: NoticePeers, background: Background, metrics: GatewayMetrics) -> None:
        self._peers = peers
        self._background = background
        self._metrics = metrics
        self._sent_at: dict[tuple[str, str, Pair], float] = {}

    def send(self, endpoint: str, request_id: str, pair: Pair, reason: str) -> None:
        """Repeated by the link until answered; a peer that is gone needs no Cancel."""
        now = asyncio.get_running_loop().time()
        key = (endpoint, request_id, pair)
        if now - self._sent_at.get(key, -_REPEAT_S) < _REPEAT_S:
            return
        self._sent_at.pop(key, None)  # to the end of the order
        self._sent_at[key] = now
        self._metrics.cancels.labels(reason).inc()
        self._background.spawn(self._request(endpoint, Cancel(request_id=request_id, pair=pair, reason=reason)))

    def tick(self, now: float) -> None:
        """Forgets what was sent long ago. (In order of sending: the oldest come first.)"""
        while self._sent_at:
            key = next(iter(self._sent_at))
            if now - self._sent_at[key] < _REPEAT_S:
                return
            del self._sent_at[key]

    async def _request(self, endpoint: str, cancel: Cancel) -> None:
        try:
            await self._peers.request(endpoint, cancel)
        except PeerUnavailable as error:
            log.info("cancel_unanswered", request_id=cancel.request_id, pair=str(cancel.pair), error=str(error))
