"""What the plugin's two sides tell each other and the API process. Plain values: they cross process borders.

Step down: `PluginStep`. Up: `WorkerNews` of each rank, merged by vLLM; out of the engine: `news_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from connector.step import StepMeta
from pdq.wire.types import TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginStep:
    """From the scheduler's side to each rank, every step."""

    meta: StepMeta
    refused: tuple[tuple[str, str], ...] = ()
    """D: loads that can't be tried, with the reason: to be reported as failed."""
    external: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """D: blocks that a load or receive fills, for vLLMs that are told of failures by block."""
    has_news: bool = False
    """The scheduler's side has something to report, which needs a worker's report to ride on in some vLLMs."""
    may_wait: bool = False
    """Nothing is computed in it, and KV is under way: the step may last until some of that ends, for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNews:
    """From one rank, or from several: of loads and sends that ended in this step."""

    stats: dict[str, TransferStats] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    """Ids that will be reported in the next step -> by how many ranks. Only where reports are announced before."""
    counts: dict[str, int] = field(default_factory=dict)
    """As in TransferResults."""
    fatal: str | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.stats or self.failed or self.ended or self.counts or self.fatal)

    def joined(self, other: WorkerNews) -> WorkerNews:
        return WorkerNews(
            stats=joined_stats(self.stats, other.stats),
            failed=other.failed | self.failed,
            ended=_added(self.ended, other.ended),
            counts=_added(self.counts, other.counts),
            fatal=self.fatal or other.fatal,
        )


def _added(some: dict[str, int], others: dict[str, int]) -> dict[str, int]:
    return some | {name: some.get(name, 0) + number for name, number in others.items()}


def joined_stats(some: dict[str, TransferStats], others: dict[str, TransferStats]) -> dict[str, TransferStats]:
    """Ranks work side by side: bytes add up, the slowest tells the time."""
    joined = dict(some)
    for engine_request_id, stats in others.items():
        if (known := joined.get(engine_request_id)) is not None:
            stats = TransferStats(
                num_bytes=known.num_bytes + stats.num_bytes,
                num_descriptors=known.num_descriptors + stats.num_descriptors,
                seconds=max(known.seconds, stats.seconds),
                hidden_seconds=max(known.hidden_seconds, stats.hidden_seconds),
            )
        joined[engine_request_id] = stats
    return joined


@dataclass(slots=True)
class OutsideNews:
    """For whoever submitted the requests, under the ids given there, and for the metrics. Taken once."""

    released: list[str] = field(default_factory=list)
    """Blocks are free. Each exactly once."""
    failed: dict[str, str] = field(default_factory=dict)
    transfers: dict[str, TransferStats] = field(default_factory=dict)
    fatal: str | None = None
    counts: dict[str, float] = field(default_factory=dict)
    observed: dict[str, list[float]] = field(default_factory=dict)
    """D: of each transfer its `seconds`, `bytes` and `descriptors`."""

    def __bool__(self) -> bool:
        """Somebody waits for it. Numbers come along when there is an occasion."""
        return bool(self.released or self.failed or self.transfers or self.fatal)

    def count(self, name: str, number: float = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    def observe(self, stats: TransferStats) -> None:
        for name, value in (
            ("seconds", stats.seconds),
            ("bytes", stats.num_bytes),
            ("descriptors", stats.num_descriptors),
        ):
            self.observed.setdefault(name, []).append(value)
        if stats.hidden_seconds:
            self.count("hidden_seconds", stats.hidden_seconds)

    def take(self) -> dict[str, Any]:
        """Only what there is, in values that msgpack knows."""
        news: dict[str, Any] = {}
        for name, numbers in (("counts", self.counts), ("observed", self.observed)):
            if numbers:
                news[name] = numbers
        if self.released:
            news["released"] = self.released
        if self.failed:
            news["failed"] = self.failed
        if self.transfers:
            news["transfers"] = {
                outside_id: {
                    "num_bytes": stats.num_bytes,
                    "num_descriptors": stats.num_descriptors,
                    "seconds": stats.seconds,
                    "hidden_seconds": stats.hidden_seconds,
                }
                for outside_id, stats in self.transfers.items()
            }
        if self.fatal:
            news["fatal"] = self.fatal
        self.released, self.failed, self.transfers, self.fatal = [], {}, {}, None
        self.counts, self.observed = {}, {}
        return news


def joined_news(all_news: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Of several steps or ranks: lists are strung together, counts add up."""
    joined: dict[str, Any] = {}
    for news in all_news:
        for key, value in news.items():
            if key not in joined:
                joined[key] = _copy(value)
            elif key == "counts":
                for name, count in value.items():
                    joined[key][name] = joined[key].get(name, 0) + count
            elif key == "observed":
                for name, values in value.items():
                    joined[key].setdefault(name, []).extend(values)
            elif isinstance(value, list):
                joined[key].extend(value)
            elif isinstance(value, dict):
                joined[key].update(value)
    return joined


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value
