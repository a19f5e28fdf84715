"""The connector's counters in vLLM's own form: log line and Prometheus metrics of the API process."""

from __future__ import annotations

from typing import Any, Final

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connector.failure_kinds import FAILED, KINDS
from connector.vllm_plugin.news import joined_news

_HISTOGRAMS: Final = {
    "seconds": (
        "vllm:pdq_kv_transfer_seconds",
        "D: from blocks allocated (pull) or the first write (push) to all KV being there",
        [0.001 * 2**i for i in range(15)],
    ),
    "bytes": ("vllm:pdq_kv_transfer_bytes", "D: bytes of one request's KV", [2.0 ** (12 + 2 * i) for i in range(12)]),
    "descriptors": (
        "vllm:pdq_kv_transfer_descriptors",
        "D: runs of neighbouring bytes that one request's KV came in",
        [4.0**i for i in range(9)],
    ),
}
_COUNTERS: Final = {
    "hidden_seconds": ("vllm:pdq_kv_hidden_seconds", "D: of push transfers, time before the prefill had ended"),
    "tokens_used": ("vllm:pdq_kv_tokens_used", "D: prompt tokens whose KV came from P"),
    "tokens_sent": ("vllm:pdq_kv_tokens_sent", "P: prompt tokens whose KV was handed over"),
    "prefills_expired": ("vllm:pdq_kv_expired_prefills", "P: prefills whose KV was freed since no reader showed life"),
    "renewals": ("vllm:pdq_kv_renewals", "P: signs of life of readers"),
    "retries": ("vllm:pdq_kv_failed_writes", "P: calls that failed; most pushes are written once more then"),
    "fences": ("vllm:pdq_kv_fences", "Transports replaced after a failed call, to shut out what it may still move"),
    "reports_dropped": ("vllm:pdq_kv_dropped_reports", "Ends of transfers that nobody waited for"),
    "answers_ignored": ("vllm:pdq_kv_ignored_answers", "Late or repeated answers of peers"),
}


class PdqStats(KVConnectorStats):  # type: ignore[misc]
    """`data` as `connector.vllm_plugin.news` describes it."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> PdqStats:
        self.data = joined_news((self.data, other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Of an interval, for the log line."""
        observed, counts = self.data.get("observed", {}), self.data.get("counts", {})
        seconds, num_bytes = observed.get("seconds", []), sum(observed.get("bytes", []))
        reduced: dict[str, int | float] = {}
        if seconds:
            reduced = {
                "transfers": len(seconds),
                "MB": round(num_bytes / 1e6, 1),
                "mean_ms": round(sum(seconds) / len(seconds) * 1e3, 2),
                "max_ms": round(max(seconds) * 1e3, 2),
                "descriptors": sum(observed.get("descriptors", [])),
            }
        return reduced | {name: round(count, 3) for name, count in sorted(counts.items())}

    def is_empty(self) -> bool:
        return not self.data


def stats_for_log(data: dict[str, Any] | None) -> PdqStats:
    """Numbers only: the log adds up many steps, ids have no place there."""
    return PdqStats(data={key: value for key, value in (data or {}).items() if key in ("counts", "observed")})


class PdqPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One set of metrics for all engines of the process, told apart by vLLM's own labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = per_engine_labelvalues
        self._histograms = {
            key: metric_types[Histogram](name=name, documentation=text, buckets=buckets, labelnames=labelnames)
            for key, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            key: metric_types[Counter](name=name, documentation=text, labelnames=labelnames)
            for key, (name, text) in _COUNTERS.items()
        }
        self._failures = metric_types[Counter](
            name="vllm:pdq_kv_failed_transfers",
            documentation="Transfers that failed, by kind of failure",
            labelnames=[*labelnames, "reason"],
        )
        for values in per_engine_labelvalues.values():  # so that each exists before it first counts
            for metric in (*self._histograms.values(), *self._counters.values()):
                metric.labels(*values)
            for kind in KINDS:
                self._failures.labels(*values, kind)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self._labels[engine_idx]
        for key, observed in transfer_stats_data.get("observed", {}).items():
            for value in observed:
                self._histograms[key].labels(*values).observe(value)
        for key, count in transfer_stats_data.get("counts", {}).items():
            if key.startswith(FAILED):
                self._failures.labels(*values, key.removeprefix(FAILED)).inc(count)
            elif key in self._counters:
                self._counters[key].labels(*values).inc(count)
