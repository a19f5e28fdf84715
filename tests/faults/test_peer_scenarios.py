"""A prefill worker dies or stops with twelve requests in flight: scenarios in which a peer lost or hung some of them.

`benchmarks/fault_scenarios.py` plays them, says what is counted, and prints the figures of docs/faults.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import psutil
import pytest

from benchmarks.fault_scenarios import (
    ENVIRON,
    LEASE_S,
    NUM_AFTERWARDS,
    NUM_REQUESTS,
    SCENARIOS,
    Outcome,
    Scenario,
    play,
)
from tests.pipeline.harness import running
from tests.servers import RedisServer

REAPING_S = 1.0
"""From a lease's end until somebody reaps: a sixth of a lease."""
LOAD_S = 4.0
"""What a busy machine may add."""
NEVER_S = 3600.0
LONG = pytest.mark.long
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize(
    ("scenario", "mode"),
    [
        pytest.param(BY_NAME["kill"], "push", id="kill-push"),
        pytest.param(BY_NAME["stop and wake"], "pull", id="stop and wake-pull"),
        pytest.param(BY_NAME["kill"], "pull", marks=LONG, id="kill-pull"),
        pytest.param(BY_NAME["stop and wake"], "push", marks=LONG, id="stop and wake-push"),
        pytest.param(BY_NAME["stop"], "push", marks=LONG, id="stop-push"),
        pytest.param(BY_NAME["stop"], "pull", marks=LONG, id="stop-pull"),
    ],
)
@pytest.mark.timeout(300)
async def test_a_prefill_worker_that_is_lost_costs_nobody_an_answer(
    tmp_path: Path, private_redis: RedisServer, scenario: Scenario, mode: Literal["push", "pull"]
) -> None:
    async with running(
        tmp_path, private_redis, prefill=2, mode=mode, environ=ENVIRON, restart_s=(NEVER_S, NEVER_S)
    ) as pipeline:
        pid = pipeline.child("prefill-1").pid
        assert pid is not None

        outcome = await play(
            scenario, port=pipeline.port, store=pipeline.redis, model=pipeline.model, victim=psutil.Process(pid)
        )

        print(f"lease left {outcome.lease_left_s:.2f} s, recovered after {outcome.recovered_s:.2f} s")
        print(f"slowest answer after {outcome.slowest_s:.2f} s")
        assert [answer.error for answer in outcome.answers if answer.error] == []
        assert Outcome.count(outcome.answers) == (NUM_REQUESTS, 0, 0)
        assert Outcome.count(outcome.afterwards) == (NUM_AFTERWARDS, 0, 0)
        assert outcome.num_held
        assert 0 < outcome.lease_left_s <= LEASE_S
        assert outcome.recovered_s < outcome.lease_left_s + REAPING_S + LOAD_S
        await pipeline.quiet()
