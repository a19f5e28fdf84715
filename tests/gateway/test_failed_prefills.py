"""A prompt whose prefills come to nothing, again and again, may be what kills the workers: the queue must know."""

from __future__ import annotations

from tests.gateway.echo_pipeline import Script

TEXT = {"model": "sim", "prompt": "hello", "max_tokens": 20}


async def test_prefills_that_came_to_nothing_are_counted_on_over_all_gens(here):
    script = Script(fail_after=0, is_retryable=True, fail_code="kv_transfer_failed")
    here.pipeline.script = lambda lease: script

    await here.http.post("/v1/completions", json=TEXT)

    assert [here.pipeline.taken.get_nowait().failures for _ in range(4)] == [0, 1, 2, 3]


async def test_what_fails_in_the_decode_worker_says_nothing_against_the_prompt(here):
    here.pipeline.script = lambda lease: Script(fail_after=0, is_retryable=True, fail_code="engine_error")

    await here.http.post("/v1/completions", json=TEXT)

    assert [here.pipeline.taken.get_nowait().failures for _ in range(4)] == [0, 0, 0, 0]
