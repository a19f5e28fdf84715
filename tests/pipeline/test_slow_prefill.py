"""A prefill that takes long is nobody's death: everybody who waits for it hears that the others live."""

from __future__ import annotations

from pathlib import Path

from tests.pipeline import process_logs
from tests.pipeline.harness import running
from tests.servers import RedisServer

ENVIRON = {
    # Its frames come once a second and tell how often its engine, once a second, too, has looked around: so every two
    # seconds something is new, and a busy machine may be late.
    "PDQ_GATEWAY__OWNER_KV_WAIT_S": "5",
    "PDQ_GATEWAY__STALL_S": "5",
    "PDQ_GATEWAY__OWNER_SILENCE_S": "2.5",
    "PDQ_PREFILL_WORKER__SIM_PREFILL_MS": "10000",
}


async def test_the_first_request_of_a_decode_worker_may_wait_longer_for_a_push_than_a_dead_one_would_be_given(
    tmp_path: Path, private_redis: RedisServer
) -> None:
    async with running(tmp_path, private_redis, mode="push", environ=ENVIRON) as pipeline:
        answer = await pipeline.complete("a prompt that takes ten seconds", max_tokens=8)

        assert answer["choices"][0]["text"] == "a prompt"
        assert not process_logs.events(pipeline.log_dir, "decode_worker_dead", "gateway-1")
        assert not process_logs.events(pipeline.log_dir, "request_migrated", "gateway-1")
        await pipeline.quiet()
