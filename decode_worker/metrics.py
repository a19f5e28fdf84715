"""What Prometheus sees of a decode worker: requests by outcome, tokens, KV transfers, pool. No per-request labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

from broker.base import WorkerRecord
from engine.base import EngineStats
from pdq.wire.types import TransferStats

RequestOutcome = Literal["finished", "failed", "cancelled", "not_admitted", "stopped"]
"""`cancelled`: by the gateway, also in place of Go; `not_admitted`: the gateway was silent, or a higher pair came."""

_KV_CAUSES: Final = {
    "P says gone": "kv_gone",
    "P does not answer": "kv_silent",
    "P has not answered": "kv_silent",
    "not read within": "kv_timeout",
    "read failed": "kv_read",
}
"""How the connector's reasons begin: the rest names peers and times, which are no label."""


class DecodeMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.num_tokens = 0
        """Sent since the start."""
        self._requests = Counter(
            "pdq_decode_requests", "Requests that left this worker", ["outcome"], registry=registry
        )
        self._failures = Counter(
            "pdq_decode_failures", "Requests that the engine gave up, by cause", ["reason"], registry=registry
        )
        self._tokens = Counter("pdq_decode_tokens", "Tokens sent to gateways", registry=registry)
        self._frames = Counter("pdq_decode_frames", "Frames of tokens sent to gateways", registry=registry)
        self._repeats = Counter(
            "pdq_decode_frames_repeated", "Frames sent again, after a reconnect or without an answer", registry=registry
        )
        self._transfers = Counter("pdq_kv_transfers", "KV reads of finished requests", registry=registry)
        self._bytes = Counter("pdq_kv_transfer_bytes", "KV read from prefill workers", registry=registry)
        self._seconds = Counter("pdq_kv_transfer_seconds", "Time of these reads, added up", registry=registry)
        self._descriptors = Counter("pdq_kv_transfer_descriptors", "Pieces that were read", registry=registry)

    def on_end(self, outcome: RequestOutcome) -> None:
        self._requests.labels(outcome).inc()

    def on_failure(self, code: str, detail: str) -> None:
        """`code`: stable word of the engine."""
        reason = code
        if code == "kv_transfer_failed":
            reason = next((word for start, word in _KV_CAUSES.items() if detail.startswith(start)), "kv_other")
        self._failures.labels(reason).inc()

    def on_frame(self, num_tokens: int) -> None:
        self._frames.inc()
        self._tokens.inc(num_tokens)
        self.num_tokens += num_tokens

    def on_repeat(self) -> None:
        self._repeats.inc()

    def on_transfer(self, transfer: TransferStats) -> None:
        self._transfers.inc()
        self._bytes.inc(transfer.num_bytes)
        self._seconds.inc(transfer.seconds)
        self._descriptors.inc(transfer.num_descriptors)

    def watch(self, record: Callable[[], WorkerRecord], stats: Callable[[], EngineStats | None]) -> None:
        """Gauges that are read when somebody looks, from the listener's thread."""
        for name, text, read in (
            ("pdq_decode_running", "Requests that the engine decodes", lambda: record().running),
            ("pdq_decode_waiting", "Requests that wait for their KV or for room", lambda: record().waiting),
            ("pdq_kv_blocks_free", "KV blocks not promised to any request", lambda: record().free_blocks),
            ("pdq_kv_blocks_total", "KV blocks of the pool", lambda: record().total_blocks),
        ):
            Gauge(name, text, registry=self._registry).set_function(read)
        preemptions = Gauge("pdq_engine_preemptions", "Since the start, of requests by others", registry=self._registry)
        preemptions.set_function(lambda: found.num_preemptions if (found := stats()) else 0)
