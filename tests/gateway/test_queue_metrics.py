"""The queue's gauges."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry

from broker.base import QueueDepth
from broker.delivery import QueueSettings
from broker.errors import QueueUnavailable
from broker.memory import MemoryQueue
from gateway.queue_metrics import QueueMetrics
from tests.broker.stores import job


class DownQueue(MemoryQueue):
    """Its Redis has gone away."""

    async def depth(self) -> QueueDepth:
        raise QueueUnavailable("down")


async def test_gauges_show_jobs_tokens_age_and_dead_letters() -> None:
    now_s, registry = [100.0], CollectorRegistry()
    queue = MemoryQueue(QueueSettings(), clock=lambda: now_s[0])
    for name, tokens in (("a", 5), ("b", 7), ("c", 11)):
        await queue.enqueue(job(name, tokens=tokens))
    await queue.take("p1", max_tokens=100, max_jobs=1)
    now_s[0] += 2.5

    await QueueMetrics(queue, registry).poll()

    shown = {
        (name, state): registry.get_sample_value(name, {"state": state})
        for name in ("pdq_queue_jobs", "pdq_queue_tokens")
        for state in ("queued", "running")
    }
    assert shown == {
        ("pdq_queue_jobs", "queued"): 2,
        ("pdq_queue_jobs", "running"): 1,
        ("pdq_queue_tokens", "queued"): 18,
        ("pdq_queue_tokens", "running"): 5,
    }
    assert registry.get_sample_value("pdq_queue_oldest_wait_seconds") == 2.5
    assert registry.get_sample_value("pdq_queue_dead_letters") == 0


async def test_what_is_not_known_is_not_shown_as_zero() -> None:
    registry = CollectorRegistry()

    await QueueMetrics(DownQueue(QueueSettings()), registry).poll()

    assert math.isnan(registry.get_sample_value("pdq_queue_jobs", {"state": "queued"}) or 0)
    assert math.isnan(registry.get_sample_value("pdq_queue_oldest_wait_seconds") or 0)
