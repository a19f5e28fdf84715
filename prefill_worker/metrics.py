"""What Prometheus sees of a prefill worker: jobs by outcome, times, KV pool. No per-request labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from broker.base import WorkerRecord
from broker.delivery import cause_of
from engine.base import EngineStats
from prefill_worker.held import HeldJob

_TIME_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_MOST_ATTEMPTS: Final = 3


class PrefillMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.num_tokens = 0
        """Computed since the start."""
        self._leases = Gauge("pdq_prefill_leases", "Jobs that this worker holds", registry=registry)
        self._takes = Counter("pdq_prefill_takes", "Jobs taken, by their attempt", ["attempt"], registry=registry)
        """Attempt: `1`, `2`, `3`, `more`."""
        self._jobs = Counter("pdq_prefill_jobs", "Jobs that left this worker", ["outcome"], registry=registry)
        """Outcomes: see `held.JobOutcome`."""
        self._prefill = Histogram(
            "pdq_prefill_seconds", "From the take to the computed KV", buckets=_TIME_S, registry=registry
        )
        self._queue_wait = Histogram(
            "pdq_prefill_queue_wait_seconds", "From enqueue to take", buckets=_TIME_S, registry=registry
        )
        self._offers = Counter(
            "pdq_prefill_offers", "Offers to decode workers by answer", ["answer"], registry=registry
        )
        """Answers: `accepted`, `busy` (a placement refused), `gone`, `silent`."""
        self._tokens = Counter("pdq_prefill_tokens", "Tokens of the computed prompts", registry=registry)
        self._cached = Counter("pdq_prefill_cached_tokens", "Of these in the prefix cache", registry=registry)

        self._failures = Counter(
            "pdq_prefill_failures", "Jobs given back because the engine failed", ["cause"], registry=registry
        )
        """Causes: `engine_error`, `engine_stalled`, `kv_transfer_failed`, ... the words that failures begin with."""
        self._reaped = Counter(
            "pdq_prefill_reaped", "Expired leases of any worker that this one put back", registry=registry
        )
        self._dead = Counter(
            "pdq_prefill_dead_jobs", "Jobs that the queue ended, as this worker found", ["reason"], registry=registry
        )
        """Reasons: `max_attempts` and `payload_invalid` (dead letters), `payload_lost`, `deadline`, `orphaned`."""
        self._fenced = Counter(
            "pdq_prefill_fenced", "Calls refused since the job was another's by then", ["call"], registry=registry
        )
        """Calls: `renew` (the lease was lost), `settle`."""

    def on_failure(self, failure: str) -> None:
        self._failures.labels(cause_of(failure)).inc()

    def on_reaped(self, num_put_back: int) -> None:
        self._reaped.inc(num_put_back)

    def on_dead(self, reason: str) -> None:
        self._dead.labels(reason).inc()

    def on_fenced(self, call: str) -> None:
        self._fenced.labels(call).inc()

    def on_take(self, held: HeldJob) -> None:
        self._queue_wait.observe(held.lease.queue_wait_s)
        attempt = held.lease.pair.attempt
        self._takes.labels(str(attempt) if attempt <= _MOST_ATTEMPTS else "more").inc()
        self._leases.inc()

    def on_prefilled(self, held: HeldJob, *, prefill_s: float, cached_tokens: int) -> None:
        self._prefill.observe(prefill_s)
        self._tokens.inc(held.num_tokens)
        self.num_tokens += held.num_tokens - cached_tokens
        self._cached.inc(cached_tokens)

    def on_answer(self, answer: str) -> None:
        self._offers.labels(answer).inc()

    def on_end(self, held: HeldJob) -> None:
        self._jobs.labels(held.outcome.value).inc()
        self._leases.dec()

    def watch(self, record: Callable[[], WorkerRecord], stats: Callable[[], EngineStats | None]) -> None:
        """Gauges that are read when somebody looks, from the listener's thread."""
        for name, text, read in (
            ("pdq_prefill_running", "Prefills that the engine computes", lambda: record().running),
            ("pdq_prefill_parked", "Finished prefills that wait for a decode worker", lambda: record().parked),
            ("pdq_kv_blocks_free", "KV blocks not promised to any job", lambda: record().free_blocks),
            ("pdq_kv_blocks_total", "KV blocks of the pool", lambda: record().total_blocks),
        ):
            Gauge(name, text, registry=self._registry).set_function(read)
        preemptions = Gauge("pdq_engine_preemptions", "Since the start, of requests by others", registry=self._registry)
        preemptions.set_function(lambda: found.num_preemptions if (found := stats()) else 0)
