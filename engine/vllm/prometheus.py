"""vLLM's own Prometheus figures, the connector's among them, for the worker's listener.

vLLM keeps them in prometheus_client's global registry and fills them in its output handler, which isn't used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.registry import Collector

_PREFIX: Final = "vllm"
_RECORD_S: Final = 1.0
"""Steps without news are recorded this often: while KV is under way vLLM makes a thousand of them a second."""
_LOG_S: Final = 10.0


class VllmCollector(Collector):
    """What a registry shows of another one. Empty until vLLM has been imported."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        return (metric for metric in self._registry.collect() if metric.name.startswith(_PREFIX))


class StatsRecorder:
    """Hands steps' statistics to vLLM's stat loggers."""

    def __init__(self, logger_manager: Any) -> None:
        """None: vLLM has no stat loggers."""
        self._loggers = logger_manager
        self._recorded_at = -_RECORD_S
        self._logged_at = 0.0

    def on_step(self, stats: Any, *, has_outputs: bool, now: float) -> None:
        """`stats`: vLLM's SchedulerStats, whose counts are of this step."""
        if self._loggers is None:
            return
        has_counts = bool(stats.kv_connector_stats or stats.prefix_cache_stats.requests)
        if has_outputs or has_counts or now - self._recorded_at >= _RECORD_S:
            self._recorded_at = now
            self._loggers.record(scheduler_stats=stats, iteration_stats=None)
        if now - self._logged_at >= _LOG_S:
            self._logged_at = now
            self._loggers.log()
