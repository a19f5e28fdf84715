"""Push: the KV of a long prompt leaves layer by layer while later chunks are still computed."""

from __future__ import annotations

import time

import pytest

from tests.pipeline.test_worker_metrics import scrape
from tests.vllm.pair import Pair
from tests.vllm.prompts import LONG
from tests.vllm.reference import MAX_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(1200)]


async def test_layers_are_on_the_wire_before_the_prefill_has_ended(pair: Pair) -> None:
    began_at = time.monotonic()
    before = await scrape(pair.decode_metrics_port)
    prompt = [2000, *pair.reference.prompts[LONG][1:]]

    response = await pair.push.client.post(
        "/v1/completions",
        json={"model": pair.push.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0},
        headers={"X-Pdq-Trace": "1"},
    )

    assert response.status_code == 200, response.text
    await pair.quiet()
    (prefilled,) = pair.records.events("prefilled", after=began_at)
    forwards = pair.records.events("forward", after=began_at)
    calls = pair.records.events("call", after=began_at, kind="write")
    assert len(forwards) == 3, "chunks of 512 tokens"
    assert calls[0]["began_at"] < forwards[0]["at"], "some of the first chunk's layers left while others were computed"
    early = sum(call["num_bytes"] for call in calls if call["at"] < prefilled["at"])
    total = sum(call["num_bytes"] for call in calls)
    assert early > total / 2, f"{early} of {total} bytes had arrived when the prefill ended"
    after = await scrape(pair.decode_metrics_port)
    in_all, hidden = (
        figure(after, name) - figure(before, name)
        for name in ("vllm:pdq_kv_transfer_seconds_sum", "vllm:pdq_kv_hidden_seconds_total")
    )
    assert figure(after, "vllm:pdq_kv_transfer_bytes_sum") - figure(before, "vllm:pdq_kv_transfer_bytes_sum") == total
    assert 0 < hidden <= in_all
    print(
        f"\n{early / total:.0%} of {total / 1e6:.1f} MB had arrived when the prefill ended;"
        f" {hidden * 1000:.0f} of {in_all * 1000:.0f} ms were hidden; {response.json()['pdq']}"
    )


def figure(scraped: dict[str, float], name: str) -> float:
    """Of the only engine behind it; 0: nothing was counted yet."""
    return sum(value for key, value in scraped.items() if key.partition("{")[0] == name)
