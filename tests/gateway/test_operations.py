"""Health, readiness, metrics, models, documentation, request ids."""

from __future__ import annotations

import pytest

from broker.errors import QueueUnavailable
from tests.gateway.conftest import World, eventually, world
from tests.gateway.echo_pipeline import Script

TEXT = {"model": "sim", "prompt": "hello", "max_tokens": 2}


async def ready_says(here: World, status: int, *reasons: str) -> None:
    async def holds():
        answer = await here.http.get("/ready")
        return (answer.status_code, tuple(answer.json().get("reasons", ()))) == (status, reasons)

    await eventually(holds)


async def test_readiness_has_a_reason_for_each_missing_part_and_comes_back_by_itself(here, monkeypatch):
    await ready_says(here, 200)
    await here.registry.remove("prefill-decode-echo")
    await ready_says(here, 503, "no_prefill_worker")
    await here.registry.remove("decode-decode-echo")
    await ready_says(here, 503, "no_prefill_worker", "no_decode_worker")
    for role in ("prefill", "decode"):
        await here.registry.heartbeat(here.pipeline.record(role))
    await ready_says(here, 200)

    async def refuse(record):
        raise QueueUnavailable("down")

    with monkeypatch.context() as patch:
        patch.setattr(here.registry, "heartbeat", refuse)
        await ready_says(here, 503, "queue_unavailable")
    await ready_says(here, 200)


async def test_health_is_about_the_process_only(here):
    await here.registry.remove("prefill-decode-echo")

    assert (await here.http.get("/health")).json() == {"status": "ok"}


async def test_the_gateway_is_in_the_registry_with_its_addresses(here):
    (record,) = [record for record in await here.registry.workers() if record.role == "gateway"]

    assert (record.worker_id, record.state, record.http) == ("gateway-test", "ready", here.url)
    assert record.endpoint.startswith("tcp://127.0.0.1:")


async def test_models_lists_the_one_model(here):
    (model,) = (await here.openai.models.list()).data

    assert model.id == "sim"
    assert (await here.openai.models.retrieve("sim")).id == "sim"
    assert (await here.http.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


async def test_the_documentation_names_the_request_fields(here):
    schema = (await here.http.get("/openapi.json")).json()

    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages", "max_completion_tokens", "min_p"} <= set(body["properties"])
    assert "$ref" not in str(body)
    assert (await here.http.get("/docs")).status_code == 200


async def test_metrics_count_each_request_once_by_its_outcome(here):
    for _ in range(3):
        await here.http.post("/v1/completions", json=TEXT)
    here.pipeline.script = lambda lease: Script(fail_after=0)
    await here.http.post("/v1/completions", json=TEXT)
    await here.http.post("/v1/completions", json={**TEXT, "n": 2})

    text = (await here.http.get("/metrics")).text

    for outcome, count in (("ok", 3), ("error", 1), ("refused", 1)):
        assert f'pdq_requests_total{{endpoint="completions",outcome="{outcome}"}} {count}.0' in text
    assert 'pdq_time_to_first_token_seconds_bucket{le="+Inf"} 3.0' in text
    assert "pdq_inter_token_latency_seconds_count 3.0" in text
    assert "pdq_generated_tokens_total 6.0" in text
    assert 'pdq_request_errors_total{code="engine_error"} 1.0' in text
    assert "pdq_requests_in_flight 0.0" in text


@pytest.mark.parametrize(
    ("given", "echoed"),
    [(b"abc-1", "abc-1"), (b"a b\tc\xe4", "abc"), (b"x" * 10_000, "x" * 128), (b"", None)],
)
async def test_the_client_s_request_id_is_echoed_clean_and_never_ours(here, given, echoed):
    answer = await here.http.post("/v1/completions", json=TEXT, headers={"X-Request-Id": given})

    job = here.pipeline.taken.get_nowait().job
    assert answer.headers["x-request-id"] == (echoed or job.request_id)
    assert len(job.request_id) == 32
    assert answer.json()["id"] == f"cmpl-{job.request_id}"


async def test_a_trace_context_travels_with_the_job(here):
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await here.http.post("/v1/completions", json=TEXT, headers={"traceparent": traceparent})
    await here.http.post("/v1/completions", json=TEXT, headers={"traceparent": "nonsense"})

    assert here.pipeline.taken.get_nowait().job.traceparent == traceparent
    assert here.pipeline.taken.get_nowait().job.traceparent == ""


async def test_a_prompt_that_no_worker_s_memory_can_hold_is_refused():
    async with world() as here:
        small = {"total_blocks": 4, "block_size": 16}
        for role in ("prefill", "decode"):
            await here.registry.heartbeat(here.pipeline.record(role, **small))

        async def is_known():
            return (await here.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 64

        await eventually(is_known)
        answer = await here.http.post("/v1/completions", json={**TEXT, "prompt": "x" * 64})

    assert answer.json()["error"]["code"] == "context_length_exceeded"
