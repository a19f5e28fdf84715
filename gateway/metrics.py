"""What /metrics shows of a gateway: requests by outcome, times as a client sees them, tokens. No per-request labels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.route import Route

_WAIT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAP_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)


class Histogram(Collector):
    """As prometheus_client's without labels; `observe` takes 0.3 us instead of 3, which counts once per token."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        total = 0
        buckets = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class Tally(Collector):
    """A counter without labels and locks, for what counts once per token."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self.count = 0
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, value=float(self.count))


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter("pdq_requests", "HTTP requests by outcome", ["endpoint", "outcome"], registry=registry)
        """Outcome: `ok`, `refused` (before it was queued), `error`, `cancelled` (the client left)."""
        self.errors = Counter("pdq_request_errors", "Errors told to clients", ["code"], registry=registry)
        self.ttft = Histogram(
            "pdq_time_to_first_token_seconds", "From the request's receipt to its first token", _WAIT_S, registry
        )
        self.itl = Histogram("pdq_inter_token_latency_seconds", "Between two tokens of a request", _GAP_S, registry)
        self.queue_wait = Histogram("pdq_queue_wait_seconds", "From enqueue to take", _WAIT_S, registry)
        self.prefill = Histogram("pdq_prefill_seconds", "Prefill, as P saw it", _WAIT_S, registry)
        self.duration = Histogram("pdq_request_duration_seconds", "From receipt to the end", _WAIT_S, registry)
        self.prompt_tokens = Counter("pdq_prompt_tokens", "Prompt tokens queued", registry=registry)
        self.cached_tokens = Counter("pdq_cached_prompt_tokens", "Of these in P's prefix cache", registry=registry)
        self.generated_tokens = Tally("pdq_generated_tokens", "Tokens taken over", registry)
        self.kv_bytes = Counter("pdq_kv_transferred_bytes", "KV moved for finished requests", registry=registry)
        self.migrations = Counter(
            "pdq_migrations", "Requests enqueued again, by cause", ["reason", "resume"], registry=registry
        )
        """Resume: `fresh` (no token yet), `exact`, `approximate` (see `migration.resume_kind`)."""
        self.deadlines = Counter("pdq_deadlines", "Requests that ran out of time", ["phase"], registry=registry)
        """Phases: `enqueueing`, `queued`, `admitted` (no token yet), `streaming`."""
        self.cancels = Counter("pdq_cancels", "Attempts told to stop, by cause", ["reason"], registry=registry)
        """Reasons: `client_disconnected`, `deadline_exceeded`, `stop_string`, ..., or why the request moved on."""
        self.dead_owners = Counter(
            "pdq_decode_workers_lost", "Decode workers given up while they owed tokens", ["reason"], registry=registry
        )
        """Reasons: `process_gone`, `replaced`, `silent`, `no_progress`."""
        self.refused_deltas = Counter(
            "pdq_refused_deltas", "Token deltas from a pair without the right to answer", registry=registry
        )
        self.routes = Counter(
            "pdq_requests_routed",
            "Prompts by the way their prefill went, and why",
            ["mode", "reason"],
            registry=registry,
        )
        self.admits = Counter("pdq_admits", "Admit notices by answer", ["answer"], registry=registry)

    def count(self, endpoint: str, outcome: str, code: str = "") -> None:
        """One HTTP request has ended."""
        self.requests.labels(endpoint, outcome).inc()
        if outcome in ("refused", "error"):
            self.errors.labels(code).inc()

    def count_route(self, route: Route) -> None:
        self.routes.labels(route.way.value, route.reason).inc()

    def watch(self, in_flight: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Gauges that are read when somebody looks."""
        self._gauge("pdq_requests_in_flight", "Prompts without an end", in_flight)
        self._gauge("pdq_requests_waiting", "Of these without a decode worker", waiting)

    def _gauge(self, name: str, text: str, read: Callable[[], int]) -> None:
        Gauge(name, text, registry=self.registry).set_function(read)
