"""vLLM's own figures reach the worker's listener."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest

from engine.vllm.prometheus import StatsRecorder, VllmCollector
from tests.vllm_adapter.core_outputs import step


class Loggers:
    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.num_logs = 0

    def record(self, *, scheduler_stats: Any, iteration_stats: Any) -> None:
        self.recorded.append(scheduler_stats)

    def log(self) -> None:
        self.num_logs += 1


def stats(*, news: Any = None, num_lookups: int = 0) -> SimpleNamespace:
    made: SimpleNamespace = step(news=news).scheduler_stats
    made.prefix_cache_stats.requests = num_lookups
    return made


def test_the_workers_registry_shows_vllms_figures_and_no_others():
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    ours.register(VllmCollector(theirs))
    Counter("vllm:pdq_transfers", "of the connector", registry=theirs).inc(3)
    Counter("process_things", "of this process, shown already", registry=theirs).inc()

    text = generate_latest(ours).decode()

    assert "vllm:pdq_transfers_total 3.0" in text
    assert "process_things" not in text


def test_steps_with_counts_are_recorded_each_and_empty_ones_once_a_second():
    loggers = Loggers()
    recorder = StatsRecorder(loggers)
    counting = [stats(news={"released": ["a"]}), stats(num_lookups=1)]

    recorder.on_step(stats(), has_outputs=False, now=100.0)
    for number in range(500):
        recorder.on_step(stats(), has_outputs=False, now=100.1 + number / 1000)
    for one in counting:
        recorder.on_step(one, has_outputs=False, now=100.7)
    with_outputs = stats()
    recorder.on_step(with_outputs, has_outputs=True, now=100.7)
    recorder.on_step(stats(), has_outputs=False, now=101.75)

    assert len(loggers.recorded) == 5
    assert loggers.recorded[1:4] == [*counting, with_outputs]


def test_what_loggers_add_up_is_let_go_from_time_to_time():
    loggers = Loggers()
    recorder = StatsRecorder(loggers)

    for second in range(100, 131):
        recorder.on_step(stats(), has_outputs=True, now=float(second))

    assert loggers.num_logs == 4


def test_without_loggers_nothing_is_recorded():
    StatsRecorder(None).on_step(stats(), has_outputs=True, now=1.0)
