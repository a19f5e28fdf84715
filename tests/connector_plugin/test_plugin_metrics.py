"""The connector's numbers in vLLM's log line and Prometheus metrics."""

from __future__ import annotations

import msgpack
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from connector.failure_kinds import KINDS, kind_of
from connector.transfers import USED_TWICE
from tests.connector_plugin.configs import vllm_config
from tests.connector_plugin.fake_vllm import fake_vllm
from tests.connector_plugin.pairs import engines

PROMPT = list(range(100, 130))


def one_pull_and_one_failure() -> list[dict[str, object]]:
    """D's news, step by step, as they cross to the API process; and P's."""
    with fake_vllm("current") as plugin, engines(plugin) as pair:
        for name in ("a", "b"):
            pair.prefill(name, PROMPT if name == "a" else PROMPT[3:])
            pair.run(lambda name=name: pair.end(f"p-{name}") is not None)  # type: ignore[misc]
        pair.decode("a", PROMPT)
        pair.run(lambda: pair.end("d-a") is not None)
        pair.release("b")
        pair.run(lambda: "p-b" in pair.p.news.get("released", []))
        pair.decode("b", PROMPT[3:])
        pair.run_until_idle()
        crossed: list[dict[str, object]] = msgpack.unpackb(
            msgpack.packb([*pair.d.scheduler.news, *pair.p.scheduler.news])
        )
        return crossed


def test_transfers_and_failures_are_counted_once() -> None:
    registry = CollectorRegistry()
    types = {
        kind: lambda kind=kind, **options: kind(registry=registry, **options) for kind in (Counter, Gauge, Histogram)
    }
    with fake_vllm("current") as plugin:
        metrics = plugin.PdqMooncakeConnector.build_prom_metrics(vllm_config(), types, ["model"], {0: ["tiny"]})
        before = registry.get_sample_value("vllm:pdq_kv_transfer_seconds_count", {"model": "tiny"})
        for news in one_pull_and_one_failure():
            metrics.observe(news, 0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"vllm:pdq_kv_{name}", {"model": "tiny"} | labels)

    assert before == 0
    assert value("transfer_seconds_count") == 1
    assert value("transfer_bytes_sum") == 8 * 128
    assert value("transfer_descriptors_sum") == 2
    assert value("tokens_used_total") == 30
    assert value("tokens_sent_total") == 30 + 27
    assert value("failed_transfers_total", reason="gone") == 1
    assert value("failed_transfers_total", reason="timeout") == 0
    assert value("expired_prefills_total") == 0


def test_the_log_line_adds_up_an_interval_and_names_no_request() -> None:
    with fake_vllm("current") as plugin:
        build = plugin.PdqMooncakeConnector.build_kv_connector_stats
        stats = build({})
        assert stats.is_empty()
        for news in one_pull_and_one_failure():
            stats = stats.aggregate(build(news))
        line = stats.reduce()

    assert (line["transfers"], line["failed:gone"], line["tokens_used"]) == (1, 1, 30)
    assert line["MB"] == 0.0
    assert all(isinstance(value, int | float) for value in line.values())
    assert not {"released", "failed", "transfers_"} & stats.data.keys()


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("kv params: pdq_port: expected a number", "params"),
        ("P says gone: released", "gone"),
        ("P does not answer at tcp://1.2.3.4:5", "silent"),
        ("P has not answered for 10 s", "silent"),
        ("not read within 30 s", "timeout"),
        ("not written within 600 s", "timeout"),
        ("read failed: status -1; also after a fence", "transport"),
        ("P failed: the prefill ended: aborted", "prefill"),
        ("P failed: write failed: status -1", "transport"),
        ("P failed: not written within 30 s after the prefill", "timeout"),
        ("P failed: no reader came within 60 s", "prefill"),
        ("P failed: released", "prefill"),
        ("rank 1 of P wrote nothing: its number of KV heads must differ", "misfit"),
        (USED_TWICE, "params"),
        ("fingerprints differ (here is P, the peer is D): dtype: ...", "misfit"),
        ("something new", "other"),
    ],
)
def test_reasons_are_counted_by_kind(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind
    assert kind in KINDS
