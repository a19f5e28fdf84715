"""The queue's depth as gauges, asked for at a slow pace. It is of the whole model, so the same from every gateway."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Gauge

from broker.base import PrefillQueue, QueueDepth
from broker.errors import QueueUnavailable


class QueueMetrics:
    """States: `queued`, `running` (leased to a prefill worker). All are NaN while the queue can't be asked."""

    def __init__(self, queue: PrefillQueue, registry: CollectorRegistry) -> None:
        self._queue = queue
        self._jobs = Gauge(
            "pdq_queue_jobs", "Prefill jobs of the model; the same at every gateway", ["state"], registry=registry
        )
        self._tokens = Gauge(
            "pdq_queue_tokens",
            "Prompt tokens of these jobs; estimated when there are many",
            ["state"],
            registry=registry,
        )
        self._oldest = Gauge(
            "pdq_queue_oldest_wait_seconds", "How long the oldest queued job has waited; 0: none", registry=registry
        )
        self._dead = Gauge("pdq_queue_dead_letters", "Dead letters that are kept", registry=registry)
        self._show(None)

    async def poll(self) -> None:
        """Asks once."""
        try:
            self._show(await self._queue.depth())
        except QueueUnavailable:
            self._show(None)

    def _show(self, depth: QueueDepth | None) -> None:
        """None: not known."""
        for gauge, value in (
            (self._jobs.labels("queued"), depth.queued if depth else None),
            (self._jobs.labels("running"), depth.running if depth else None),
            (self._tokens.labels("queued"), depth.queued_tokens if depth else None),
            (self._tokens.labels("running"), depth.running_tokens if depth else None),
            (self._oldest, depth.oldest_wait_s if depth else None),
            (self._dead, depth.dead if depth else None),
        ):
            gauge.set(math.nan if value is None else value)
