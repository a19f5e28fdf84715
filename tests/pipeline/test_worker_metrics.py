"""What a scrape of the workers' Prometheus listeners shows."""

from __future__ import annotations

from pathlib import Path

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from decode_worker.metrics import DecodeMetrics
from tests.pipeline.harness import eventually, running
from tests.servers import RedisServer, free_port

NUM_REQUESTS = 3
PROMPT = "x" * 40
MAX_TOKENS = 8


async def scrape(port: int) -> dict[str, float]:
    """Samples as `name{label=value,...}`."""
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")
    return {
        sample.name + ("{" + ",".join(f"{k}={v}" for k, v in sample.labels.items()) + "}" if sample.labels else ""): (
            sample.value
        )
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_a_scrape_shows_jobs_times_transfers_and_the_kv_pool(tmp_path: Path, private_redis: RedisServer) -> None:
    ports = {"prefill": free_port(), "decode": free_port()}
    settings = {role: {"METRICS_PORT": str(port), "NUM_BLOCKS": "64"} for role, port in ports.items()}
    settings["decode"]["DELTA_RESEND_S"] = "60"  # a busy gateway's late acknowledgement is no loss
    settings["decode"]["PREFIX_CACHING"] = "false"  # so that each request's KV is moved
    environ = {
        f"PDQ_{role.upper()}_WORKER__{name}": value for role, pairs in settings.items() for name, value in pairs.items()
    }
    async with running(tmp_path, private_redis, environ=environ) as pipeline:
        for _ in range(NUM_REQUESTS):
            await pipeline.complete(PROMPT, max_tokens=MAX_TOKENS)
        await pipeline.quiet()

        async def missing() -> str:
            jobs = (await scrape(ports["prefill"])).get("pdq_prefill_jobs_total{outcome=handed_over}")
            return "" if jobs == NUM_REQUESTS else f"{jobs} jobs handed over"

        await eventually(missing, limit_s=60, what="job count")
        prefill, decode = await scrape(ports["prefill"]), await scrape(ports["decode"])

    assert prefill["pdq_prefill_seconds_count"] == NUM_REQUESTS
    assert prefill["pdq_prefill_queue_wait_seconds_count"] == NUM_REQUESTS
    assert prefill["pdq_prefill_tokens_total"] == NUM_REQUESTS * len(PROMPT)
    assert (prefill["pdq_prefill_parked"], prefill["pdq_prefill_running"]) == (0, 0)
    assert decode["pdq_decode_requests_total{outcome=finished}"] == NUM_REQUESTS
    assert decode["pdq_decode_tokens_total"] == NUM_REQUESTS * MAX_TOKENS
    assert NUM_REQUESTS <= decode["pdq_decode_frames_total"] <= NUM_REQUESTS * MAX_TOKENS
    assert prefill["pdq_prefill_offers_total{answer=accepted}"] == NUM_REQUESTS
    assert decode["pdq_decode_frames_repeated_total"] == 0
    assert decode["pdq_kv_transfers_total"] == NUM_REQUESTS
    assert decode["pdq_kv_transfer_bytes_total"] >= NUM_REQUESTS * len(PROMPT) * 1024
    assert decode["pdq_kv_transfer_seconds_total"] > 0
    assert decode["pdq_kv_transfer_descriptors_total"] >= NUM_REQUESTS
    for samples in (prefill, decode):
        assert samples["pdq_kv_blocks_free"] == samples["pdq_kv_blocks_total"] == 64
        assert samples["process_cpu_seconds_total"] > 0


def test_failed_transfers_are_counted_by_cause_and_never_by_peer() -> None:
    registry = CollectorRegistry()
    metrics = DecodeMetrics(registry)

    metrics.on_failure("kv_transfer_failed", "P says gone: lease expired")
    metrics.on_failure("kv_transfer_failed", "P does not answer at tcp://10.0.0.1:5000")
    metrics.on_failure("kv_transfer_failed", "P has not answered for 10 s")
    metrics.on_failure("kv_transfer_failed", "something new")
    metrics.on_failure("engine_error", "no such token")

    counts = {
        reason: registry.get_sample_value("pdq_decode_failures_total", {"reason": reason})
        for reason in ("kv_gone", "kv_silent", "kv_other", "engine_error")
    }
    assert counts == {"kv_gone": 1, "kv_silent": 2, "kv_other": 1, "engine_error": 1}
