"""Push: the KV of a long prompt leaves layer by layer while later chunks are still computed."""

from __future__ import annotations

import time

import pytest

from tests.vllm.pair import Pair
from tests.vllm.prompts import LONG
from tests.vllm.reference import MAX_TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]


async def test_layers_are_on_the_wire_before_the_prefill_has_ended(pair: Pair) -> None:
    began_at = time.monotonic()
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
    print(f"\n{early / total:.0%} of {total / 1e6:.1f} MB had arrived when the prefill ended; {response.json()['pdq']}")
