"""What a decode worker tells the gateway of an engine's errors: may another worker try it?"""

from __future__ import annotations

import pytest

from broker.messages import Accepted
from engine.base import EngineOutput
from tests.workers import decode_world as d


@pytest.mark.parametrize(
    ("error", "code", "is_retryable"),
    [
        ("engine_error: out of luck", "engine_error", True),
        ("unsupported: this engine knows no output formats", "unsupported", True),
        ("invalid_output_format: unclosed group", "invalid_output_format", False),
    ],
)
async def test_only_what_is_the_requests_own_fault_is_final(error: str, code: str, is_retryable: bool) -> None:
    async with d.decode_world() as world:
        assert isinstance(await world.start("r"), Accepted)
        request = world.engine.submitted[-1]

        world.engine.say(EngineOutput(engine_request_id=request.engine_request_id, error=error))
        world.engine.free(request.engine_request_id)

        await world.until(lambda: len(world.failed) == 1)
        (failed,) = world.failed
        assert (failed.code, failed.retryable) == (code, is_retryable)
        assert failed.detail == error.partition(": ")[2]
